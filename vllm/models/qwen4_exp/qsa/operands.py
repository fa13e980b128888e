# SPDX-License-Identifier: Apache-2.0
"""Stored rows and queries as operands of the matrix units, in four planes.

Rows of one byte are loaded four bytes at a time.  Byte ``i`` of every word belongs to
*plane* ``i``: dimensions ``i``, ``i + 4``, ``i + 8`` and so on, a quarter of the width.
A few operations on a register make two fp16 numbers, and two registers of different
words make operands of two planes.  (One byte at a time, sm_86 spends 128 single-byte
loads and 256 conversions at a quarter of the rate on a tile of 64 rows: as long as the
products themselves.)  bf16 rows have four planes as well, quarters of the dimensions in
order, so that there is one algorithm.

A product over all dimensions is the sum of those over the planes, and every plane of
values has an accumulator of its own.

int8 and e4m3 become fp16, exactly: int8 needs 8 bits of fp16's 11, e4m3 is decoded as
``e4m3.py`` says.  A query becomes fp16 by dividing it by a power of two near its
largest number, which changes no bit of any number within 2^-17 of that, whatever the
size of the model's norms.
"""

from vllm.triton_utils import tl, triton

from .e4m3 import decode_word_scaled


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
    """Which dimensions each plane holds: four times ``[DIM / 4]``."""
    at = tl.arange(0, DIM // 4)
    if FORM == "bf16":
        return at, at + DIM // 4, at + DIM // 2, at + DIM // 4 * 3
    else:
        return 4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3


@triton.jit
def load_rows(base, offsets, valid, FORM: tl.constexpr, DIM: tl.constexpr):
    """Four planes ``[n, DIM / 4]`` of the rows at ``offsets``; zeros where not ``valid``.

    ``base`` points to bf16, or to int32 words of four one-byte numbers.  e4m3 comes out
    times 2^-8 (``unscale``).
    """
    at = base + offsets[:, None] + tl.arange(0, DIM // 4)[None, :]
    there = valid[:, None]
    first = tl.load(at, mask=there, other=0)
    if FORM == "bf16":
        return (
            first,
            tl.load(at + DIM // 4, mask=there, other=0),
            tl.load(at + DIM // 2, mask=there, other=0),
            tl.load(at + DIM // 4 * 3, mask=there, other=0),
        )
    elif FORM == "fp8":
        return decode_word_scaled(first)
    else:
        return _int8_word(first)


@triton.jit
def _int8(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def _int8_word(words):
    """int32 words -> fp16 of their four bytes, the lowest first.

    A byte ``x``, its sign bit flipped, is ``x + 128`` in 0..255.  Below the upper byte
    0x64 it reads as fp16 ``1024 + x + 128``, whose last place is 1.
    """
    even, odd = (words & 0x00FF00FF) ^ 0x64806480, ((words >> 8) & 0x00FF00FF) ^ 0x64806480
    return _int8(even), _int8(odd), _int8(even >> 16), _int8(odd >> 16)


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
    """One row's queries of one group, as rows are: four planes ``[BLOCK_M, DIM / 4]``.

    Also the power of two, ``[BLOCK_M]``, that each query was divided by.
    """
    heads = tl.arange(0, BLOCK_M)
    mine = heads < GROUP
    q = load_planes(base, first_head + heads, stride_head, mine, FORM, DIM)
    if FORM == "bf16":
        return q, tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        largest = tl.maximum(tl.maximum(_largest(q[0]), _largest(q[1])), tl.maximum(_largest(q[2]), _largest(q[3])))
        power, inverse = power_below(largest)
        inverse = inverse[:, None]
        return (_half(q[0], inverse), _half(q[1], inverse), _half(q[2], inverse), _half(q[3], inverse)), power


@triton.jit
def _largest(plane):
    return tl.max(tl.abs(plane.to(tl.float32)), axis=1)


@triton.jit
def _half(plane, inverse):
    return (plane.to(tl.float32) * inverse).to(tl.float16)


@triton.jit
def load_planes(base, rows, stride, there, FORM: tl.constexpr, DIM: tl.constexpr):
    """Planes of rows of ``DIM`` numbers that are ``stride`` apart; zeros where not ``there``."""
    dims = plane_dims(FORM, DIM)
    at, there = base + (rows * stride)[:, None], there[:, None]
    return (
        tl.load(at + dims[0][None, :], mask=there, other=0.0),
        tl.load(at + dims[1][None, :], mask=there, other=0.0),
        tl.load(at + dims[2][None, :], mask=there, other=0.0),
        tl.load(at + dims[3][None, :], mask=there, other=0.0),
    )


@triton.jit
def store_planes(base, rows, stride, there, planes, FORM: tl.constexpr, DIM: tl.constexpr):
    """The reverse of ``load_planes``; rows that are not ``there`` are not written."""
    dims = plane_dims(FORM, DIM)
    at, there = base + (rows * stride)[:, None], there[:, None]
    tl.store(at + dims[0][None, :], planes[0], mask=there)
    tl.store(at + dims[1][None, :], planes[1], mask=there)
    tl.store(at + dims[2][None, :], planes[2], mask=there)
    tl.store(at + dims[3][None, :], planes[3], mask=there)
