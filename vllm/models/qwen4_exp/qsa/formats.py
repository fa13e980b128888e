# SPDX-License-Identifier: Apache-2.0
"""How one token's key and value lie in a layer's cache, by ``--kv-cache-dtype``.

vLLM allocates and binds one tensor per layer, ``[blocks, kv_heads, block_size,
content]``, whatever the order of those axes in memory.  The content of one token and
K/V head is

====  ===============  ==================================================
BF16  ``2 * dim``      key, value
FP8   ``2 * dim``      key, value as e4m3 bytes; one scale per layer
INT8  ``2 * dim + 8``  key, value, and an fp32 scale of each
====  ===============  ==================================================

int8 takes the bytes of upstream's ``int8_per_token_head``, so that specs and planner are
upstream's, in another order.  There a scale stands behind each key and each value, which
puts a key of 256 at any multiple of 8 and a value at any of 4, and copies can be no wider.
Here scales stand behind all numbers of heads that lie together in a token:

==============================  =========================================
heads inside tokens (BLNHC)     key 0, value 0, key 1, value 1, …, scales
tokens inside heads (BLHNC)     key, value, their scales, for each head
==============================  =========================================

with a value's scale behind its key's.  Two heads of 256 are 65 * 16 bytes a token, and
keys and values are copied by 16; one head, or heads apart, by 8.  ``views`` is the one
place that knows this: everything else sees keys, values and their scales.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

_SCALE_BYTES = 4


@dataclass(frozen=True)
class KVFormat:
    """One way to store K/V.

    Attributes:
        name: ``bf16``, ``fp8`` or ``int8``.
        dtype: of the tensor that vLLM binds.
        scaled_rows: every key and every value carries an fp32 scale of its own.
        largest: the largest magnitude that a stored number can have.

    """

    name: str
    dtype: torch.dtype
    scaled_rows: bool
    largest: float

    def content(self, head_dim: int) -> int:
        """Elements of ``dtype`` that one token takes per K/V head, K and V together."""
        scale = _SCALE_BYTES // self.dtype.itemsize if self.scaled_rows else 0
        return 2 * (head_dim + scale)

    def token_bytes(self, head_dim: int) -> int:
        """Bytes that one token takes per K/V head, K and V and scales together."""
        return self.content(head_dim) * self.dtype.itemsize


BF16 = KVFormat("bf16", torch.bfloat16, False, torch.finfo(torch.bfloat16).max)
FP8 = KVFormat("fp8", torch.uint8, False, 448.0)
INT8 = KVFormat("int8", torch.int8, True, 127.0)

_BY_CACHE_DTYPE = {
    "auto": BF16,
    "bfloat16": BF16,
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "int8_per_token_head": INT8,
}
CACHE_DTYPES = tuple(_BY_CACHE_DTYPE)


class UnknownCacheDtype(ValueError):
    """A ``--kv-cache-dtype`` that the sparse layers cannot read."""


class WrongCache(ValueError):
    """A bound cache tensor that is not one of the layout above."""


def kv_format(cache_dtype: str) -> KVFormat:
    """The format of ``--kv-cache-dtype``; ``auto`` is the model's own bf16.

    Raises UnknownCacheDtype for any other, naming those that there are.
    """
    try:
        return _BY_CACHE_DTYPE[cache_dtype]
    except KeyError:
        raise UnknownCacheDtype(
            f"--kv-cache-dtype {cache_dtype}: the sparse layers read {', '.join(CACHE_DTYPES)}"
        ) from None


class KVViews(NamedTuple):
    """One layer's cache, nothing copied.

    ``keys`` and ``values`` are ``[blocks, block_size, kv_heads, head_dim]`` of the
    format's dtype, the scales ``[blocks, block_size, kv_heads]`` fp32, or None where
    rows have none.  A number is stored value times scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None


def views(kv_cache: torch.Tensor, form: KVFormat, head_dim: int) -> KVViews:
    """Keys, values and scales of the tensor that vLLM bound to one layer.

    Args:
        kv_cache: ``[blocks, kv_heads, block_size, form.content(head_dim)]`` with any
            strides whose last is one.
        form: how it is stored.
        head_dim: numbers in a key, and in a value.

    Raises WrongCache, with what was expected and what came, where shape, dtype,
    stride or the alignment of the scales does not fit.

    """
    expected = f"[blocks, kv_heads, block_size, {form.content(head_dim)}] of {form.dtype}"
    got = f"{tuple(kv_cache.shape)} of {kv_cache.dtype}, strides {kv_cache.stride()}"
    if kv_cache.ndim != 4 or kv_cache.shape[3] != form.content(head_dim) or kv_cache.dtype != form.dtype:
        raise WrongCache(f"a {form.name} cache of head_dim {head_dim} is {expected}; got {got}")
    if kv_cache.stride(3) != 1:
        raise WrongCache(f"the last axis of a {form.name} cache lies together in memory; got {got}")
    tokens_first = kv_cache.transpose(1, 2)
    if not form.scaled_rows:
        return KVViews(tokens_first[..., :head_dim], tokens_first[..., head_dim:], None, None)
    offset = kv_cache.storage_offset() * form.dtype.itemsize
    if any(n % _SCALE_BYTES for n in (offset, head_dim, *kv_cache.stride()[:3])):
        raise WrongCache(f"scales of a {form.name} cache lie on whole {_SCALE_BYTES}-byte words; got {got}")
    heads = kv_cache.shape[1]
    together = heads if kv_cache.stride(1) == kv_cache.shape[3] else 1
    # [blocks, block_size, runs, bytes of the heads in a run]; of the last two axes of what becomes of it one is 1.
    runs = tokens_first.unflatten(2, (heads // together, together)).flatten(3)
    numbers, scales = runs.split((together * 2 * head_dim, together * 2 * _SCALE_BYTES), -1)
    numbers = numbers.unflatten(-1, (together, 2, head_dim)).flatten(2, 3)
    scales = scales.view(torch.float32).unflatten(-1, (together, 2)).flatten(2, 3)
    return KVViews(numbers[..., 0, :], numbers[..., 1, :], scales[..., 0], scales[..., 1])
