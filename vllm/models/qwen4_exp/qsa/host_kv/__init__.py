# SPDX-License-Identifier: Apache-2.0
"""K/V of the sparse layers in host memory (`--qsa-config '{"kv_offload": true}'`).

A token reads at most the indexer's budget of rows, so rows may lie beyond PCIe. The GPU
keeps what every step reads in full: the pooled keys that are scored. A row's place in host
memory is its place in the block pool, block number and offset, so that prefix caching,
preemption and aborts work as they do for rows on the GPU, and nothing has to be told.

    settings.py   what the option does not go with
    spec.py       what a sparse layer asks of the GPU's KV cache instead of K/V
    blocks.py     attention blocks as large as a linear-attention state
    groups.py     which layers share a block table, by pipeline stage
    budget.py     as many blocks as host memory holds, or a refusal that says what is missing
    memory.py     host memory of an exact size, page-locked on a GPU
    layer.py      binds those rows to a layer as if they were its KV cache
    impl.py       which rows of a step are read where they are, and which through sections
    contexts.py   how many sections a prompt may need, from what the host knows
    prompt.py     the loop over sections, of what union.py numbers (on a GPU by numbering.py) and arena.py holds
    lines.py      rows of whole lines, for as few reads over PCIe as their bytes fill
    copies.py     copy-on-write of host rows
"""
