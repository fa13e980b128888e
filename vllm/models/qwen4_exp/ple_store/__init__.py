# SPDX-License-Identifier: Apache-2.0
"""The n-gram table (PLE, "Engram") read from files, or held in pinned memory of exact size.

The published table has 320,001,536 rows of 160 bf16 values: 102 GB, of which a token needs 16 rows (5 KiB).  It stays
on the disk: ``locate`` finds the bytes of every shard in the checkpoint's safetensors files, or ``flat`` has them in a
file of its own; ``fetch`` reads the rows of each step before its forward, and those of the next chunk of a prompt while
this one is computed; ``embedding`` puts them into a buffer of fixed address, which is all that the forward sees.

Stores, by ``--engram-config``:

    reader.py     host_file_gather: the checkpoint's shards; also the interface of a store that is read on the host
    flat/         host_file_path: one file, written by ``vllm ampere flatten-ple``
    pinned.py     cpu_offload: upstream's table in pinned memory, to the byte

What is where:

    header.py     safetensors header -> where each tensor's bytes are
    locate.py     model directory -> tensors of one table, checked
    formats.py    their dtypes and shapes -> what a row is made of
    source.py     the engine's configuration -> directory and name of a table

From a step to its rows:

    host_tokens.py  the step's tokens, without asking the device where that can be
    received.py     sampled tokens of other stages, copied to the host as they come
    ngram_ids.py    tokens -> row numbers
    staging.py      a step's batch -> its rows in the layers' buffers
    fetch.py        row numbers -> rows, some of them read ahead
    gather.py       sorted row numbers -> rows of open files
    reads/          many small reads at once
    embedding.py    the layer: no weight, one buffer, one open store
    counters.py     what it has cost

The rest:

    methods.py    tables in memory, stored as their headers say; lookup.py is their kernel
    reference.py  rows by loading the whole table: what tests compare with
    settings.py   which store is on, and what it refuses
    errors.py     one exception per way to be wrong
"""
