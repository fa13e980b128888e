# SPDX-License-Identifier: Apache-2.0
"""Index keys and index queries of one byte (``--attention-config.indexer_kv_dtype fp8``).

The numbers are upstream's: a group's key and a row's query are normed, rotated and then rounded to e4m3, both without
a scale, because their norms leave them near one.  A score is the product of the two rounded vectors.

Everything here handles codes as bytes: Triton has no e4m3 pointer below sm_89, and a card's own conversion would be a
second definition of rounding.  What is beyond 448 becomes 448; a NaN or an infinity becomes NaN, so that the row which
scores it notices (``score.py``).

Scores read four codes to an int32 word and take them apart by masks and shifts (``halves``): bytes 0 and 2, the *even*
dimensions, are neighbours in one register as two fp16, bytes 1 and 3, the *odd*, in another.  A score's sum over
dimensions does not mind their order, so each half is a product of its own.
"""

import torch

from vllm.triton_utils import tl, triton

from .e4m3 import LARGEST, encode, scaled, spread

#: Numbers of the narrowest row that is read as words: each half of it makes a product of its own, and the matrix units
#: take 16 numbers at a time.
NARROWEST_WORDS = 32

_INF = tl.constexpr(float("inf"))


@triton.jit
def as_stored(x, pointer):
    """``x`` as what ``pointer`` points to: e4m3 codes for bytes, and otherwise ``x`` itself, which the store rounds."""
    if pointer.dtype.element_ty == tl.uint8:
        number = x.to(tl.float32)
        return encode(tl.where(tl.abs(number) < _INF, number, float("nan")))
    else:
        return x


@triton.jit
def halves(words):
    """int32 words ``[n, w]`` of four codes each -> fp16 ``[n, 2 w]`` of the even and of the odd ones, times 144.

    NaN becomes infinity, as ``e4m3.py`` explains.
    """
    even, odd = spread(words, 0x3F803F80, -0x7FFF8000)
    return _numbers(even), _numbers(odd)


@triton.jit
def in_halves(words):
    """int32 words ``[n, w]`` -> fp16 ``[n, 4 w]``, the even dimensions before the odd ones; as ``halves``, but NaN is NaN."""
    even, odd = halves(words)
    both = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (words.shape[0], 4 * words.shape[1]))
    return both + both * 0.0


@triton.jit
def _numbers(bits):
    pair = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
    return scaled(tl.reshape(pair, (bits.shape[0], 2 * bits.shape[1])).to(tl.float16, bitcast=True))


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` in ``dtype``, bf16 or e4m3, as ``as_stored`` rounds them."""
    if dtype is not torch.float8_e4m3fn:
        return rows.to(dtype)
    # torch's own conversion saturates or not, by release; an infinity has to become NaN in all of them.
    return torch.where(rows.isinf(), torch.nan, rows.clamp(-LARGEST, LARGEST)).to(dtype)


def codes(tensor: object) -> object:
    """A tensor of e4m3 numbers as its bytes; anything else as it is."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8)
    return tensor


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of e4m3 numbers as int32 words of four codes each; anything else as it is.

    Raises RuntimeError where a row does not begin on a whole word or does not fill its last one.
    """
    return tensor.view(torch.int32) if tensor.dtype is torch.float8_e4m3fn else tensor


def qsa_store_cache_rows(cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """As upstream's function of the name, on a GPU: write ``rows`` into their slots, rounded to what the cache holds.

    Args:
        cache: ``[pages, page_size, 1, width]``.
        slot_mapping: ``[rows]``; rows with a slot outside the cache are dropped.
        rows: ``[rows, width]`` or ``[rows, 1, width]``.

    Raises as upstream's does where shapes do not fit.

    """
    from ..nvidia.ops.qsa import qsa_store_cache_rows as store

    store(codes(cache), slot_mapping, codes(rounded(rows, cache.dtype)))


__all__ = ["as_stored", "codes", "halves", "in_halves", "qsa_store_cache_rows", "rounded", "words"]
