# SPDX-License-Identifier: Apache-2.0
"""Rows of the n-gram table: how many there are, and which shard holds which.

Every hashed head has a prime number of rows: the first primes from `ngram_vocab_size_base` on, in order of heads and,
over all PLE layers, of layers. Their sum is rounded up and cut into `split_ngram_parts` shards of equal size, of
which the last ones are shorter or empty.
"""

from __future__ import annotations

from itertools import count, islice
from math import isqrt

from vllm.ampere.checkpoint.config import TableConfig, TextConfig


def table_rows(config: TextConfig | TableConfig, index: int) -> int:
    """Rows of the `index`-th PLE layer's table, counted from zero; 320,001,536 for the published model."""
    heads = config.ngram_heads
    primes = (n for n in count(config.ngram_vocab_size_base) if _is_prime(n))
    rows = sum(islice(primes, index * heads, (index + 1) * heads))
    divisor = config.make_ngram_vocab_size_divisible_by
    return -(-rows // divisor) * divisor


def shard_rows(rows: int, parts: int, shard: int) -> int:
    """Rows of one shard; 0 where the table ends before it."""
    full = -(-rows // parts)
    return max(0, min(full, rows - shard * full))


def _is_prime(n: int) -> bool:
    # Trial division: the base is some ten million, and sixteen primes are wanted.
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))
