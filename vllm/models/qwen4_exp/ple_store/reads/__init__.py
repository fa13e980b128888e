# SPDX-License-Identifier: Apache-2.0
"""Many small reads of a few files at once.

    spans.py    which bytes: files, offsets and sizes as arrays, and where they go
    aio.py      the kernel's own batches: one system call for thousands of reads, without the interpreter's lock
    plain.py    preadv, one call a read, for kernels and sandboxes without the former
    pool.py     a batch over a few threads; what came from the page cache, and what had to come from the disk

A queue (aio, plain) prepares a batch, reads any part of its spans in any thread, and answers for each with bytes or an
error number.  Nothing here knows
what a row is.
"""

from .pool import Outcome, ReadPool
from .spans import Spans

__all__ = ["Outcome", "ReadPool", "Spans"]
