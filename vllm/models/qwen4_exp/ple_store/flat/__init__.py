# SPDX-License-Identifier: Apache-2.0
"""A table as one file of ours, written once by ``vllm ampere flatten-ple``.

What it has over the checkpoint's shards: no row crosses a page, so a cold row is one read of 4 KiB and a token's 16 rows
never more than 64 KiB; a row's own scales lie beside it, so formats with scales need half as many reads; and there is
one file to put on the fastest disk, while the checkpoint stays where it is.

    layout.py   the header, and where each record is
    reader.py   the interface of ``reader.TableReader`` over it; what it is compared with when it is opened
    writer.py   from shards to the file: resumable, finished by one rename
    verify.py   every byte against the checksums
"""
