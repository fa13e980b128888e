# SPDX-License-Identifier: Apache-2.0
"""`--kv-cache-dtype` for the sparse-attention layers: bf16, fp8 (e4m3) and int8_per_token_head.

    settings.py   what is served, and a refusal at configuration time for everything else
    choice.py     whose kernels serve which format
    pages.py      bytes of a page, which are upstream's for int8 too
    backend.py    the attention backend that says so to the planner
    impl.py       what a layer calls: the cache write and the attention
    prepare.py    on a GPU, the write fused with what stands before it; warming up

The kernels, the formats and their references are in ../qsa; what the CPU calls is in ../cpu/qsa.
"""
