# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (QSA) in plain torch.

A token's raw index key goes into a small ring per request.  Whenever a group of
``r`` tokens is complete, the mean of its keys is normalised, rotated and kept: one
compressed key per group.  A query scores all complete groups, keeps the best
``budget / r`` and reads only their tokens' K/V, plus the open group's.

    compress.py   ring, group means, cache rows
    select.py     scores, the best groups, their tokens
    impl.py       what the attention layer calls: the cache write, and attention over
                  the selected rows, both from the references in ../../qsa
"""

from .compress import (
    gemma_rmsnorm,
    qsa_compress_groups_with_ratio,
    qsa_store_cache_rows,
)
from .select import (
    expand_qsa_block_indices,
    qsa_select_paged_decode,
    qsa_select_paged_prefill,
)

__all__ = [
    "expand_qsa_block_indices",
    "gemma_rmsnorm",
    "qsa_compress_groups_with_ratio",
    "qsa_select_paged_decode",
    "qsa_select_paged_prefill",
    "qsa_store_cache_rows",
]
