# SPDX-License-Identifier: Apache-2.0
"""The n-gram table (PLE, "Engram") read from the checkpoint's own files.

The published table has 320,001,536 rows of 160 bf16 values: 102 GB, of which a token
needs 16 rows (5 KiB).  It stays where it is: ``locate`` finds the bytes of every shard
in the safetensors files, ``gather`` reads rows by file offset, ``staging`` does so
before each forward and puts them into a buffer of fixed address, and ``embedding`` is
the layer that hands that buffer to the model.

    header.py     safetensors header -> where each tensor's bytes are
    locate.py     model directory -> tensors of one table, checked
    formats.py    their dtypes and shapes -> what a row is made of
    gather.py     row ids -> rows, with pread
    reader.py     row ids -> rows and their scales
    reference.py  the same, by loading the table: what tests compare with
    embedding.py  the layer: no weight, one staging buffer, one open table
    staging.py    a step's batch -> its rows in that buffer
    methods.py    tables in memory, stored as their headers say; lookup.py is their kernel
    source.py     the engine's configuration -> directory and name of a table
    received.py   sampled tokens of other stages, copied to the host as they come
    decode_tokens.py  from these the n-grams of a step that only decodes
    settings.py   when ``host_file_gather`` is on, and what it refuses
    errors.py     one exception per way to be wrong
"""
