# SPDX-License-Identifier: Apache-2.0
"""Stored rows and queries as operands of the matrix units, in two planes.

Rows of one byte are loaded two bytes at a time.  The low bytes of all words are the
even dimensions, the high bytes the odd ones: two *planes* of half the width, each made
by a few operations on whole registers, and loaded through ``ldmatrix``, which knows
16-bit elements and no smaller ones.  (One byte at a time, sm_86 spends 128 single-byte
loads and 256 conversions at a quarter of the rate on a tile of 64 rows: as long as the
products themselves.)  bf16 rows have two planes as well, the first and second half of
the dimensions, so that there is one algorithm.

A product over all dimensions is the sum of those over the planes, and every plane of
values has an accumulator of its own.

int8 and e4m3 become fp16, exactly: int8 needs 8 bits of fp16's 11, e4m3 is decoded as
``e4m3.py`` says.  A query becomes fp16 by dividing it by a power of two near its
largest number, which changes no bit of any number within 2^-17 of that, whatever the
size of the model's norms.
"""

from vllm.triton_utils import tl, triton

from .e4m3 import decode_pair_scaled


@triton.jit
def power_below(x):
    """The largest power of two not above ``x >= 0``, and its inverse, both exact.

    Held between 2^-100 and 2^100; NaN and infinity give the latter.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 27 << 23), 227 << 23)
    # Exponents are biased by 127: the inverse's is 2 * 127 less this one.
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def plane_dims(FORM: tl.constexpr, DIM: tl.constexpr):
    """Which dimensions each plane holds: ``[DIM / 2]`` twice."""
    at = tl.arange(0, DIM // 2)
    if FORM == "bf16":
        return at, at + DIM // 2
    else:
        return 2 * at, 2 * at + 1


@triton.jit
def load_rows(base, offsets, valid, FORM: tl.constexpr, DIM: tl.constexpr):
    """Two planes ``[n, DIM / 2]`` of the rows at ``offsets``; zeros where not ``valid``.

    ``base`` points to bf16, or to int16 words of two one-byte numbers.  e4m3 comes out
    times 2^-8 (``unscale``).
    """
    at = tl.arange(0, DIM // 2)
    low = tl.load(base + offsets[:, None] + at[None, :], mask=valid[:, None], other=0)
    if FORM == "bf16":
        high = tl.load(base + offsets[:, None] + (at + DIM // 2)[None, :], mask=valid[:, None], other=0)
        return low, high
    elif FORM == "fp8":
        return decode_pair_scaled(low)
    else:
        return _int8_pair(low)


@triton.jit
def _int8_pair(pair):
    """int16 words -> fp16 of their low and of their high bytes.

    A byte ``x``, its sign bit flipped, is ``x + 128`` in 0..255.  Below the upper byte
    0x64 it reads as fp16 ``1024 + x + 128``, whose last place is 1.
    """
    low = ((pair & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True)
    high = (((pair >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True)
    return low - 1152.0, high - 1152.0


@triton.jit
def unscale(FORM: tl.constexpr):
    """What ``load_rows`` leaves to multiply."""
    if FORM == "fp8":
        return 256.0
    else:
        return 1.0


@triton.jit
def load_query(
    base, stride_head, first_head, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr
):
    """One row's queries of one group, as rows are: two planes ``[BLOCK_M, DIM / 2]``.

    Also the power of two, ``[BLOCK_M]``, that each query was divided by.
    """
    heads = tl.arange(0, BLOCK_M)
    low_dims, high_dims = plane_dims(FORM, DIM)
    at = base + (first_head + heads[:, None]) * stride_head
    mine = heads[:, None] < GROUP
    low = tl.load(at + low_dims[None, :], mask=mine, other=0.0)
    high = tl.load(at + high_dims[None, :], mask=mine, other=0.0)
    if FORM == "bf16":
        return low, high, tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
        power, inverse = power_below(largest)
        return (low * inverse[:, None]).to(tl.float16), (high * inverse[:, None]).to(tl.float16), power
