# SPDX-License-Identifier: Apache-2.0
"""Stored rows and queries as operands of the matrix units.

The matrix units take fp16 two to a register: two neighbours along the axis that is summed
over.  Rows of one byte are loaded four bytes at a time, and a mask makes two operands of a
word, without a conversion: bytes 0 and 2, the *even* dimensions, and bytes 1 and 3, the odd.

*Keys* are summed over dimensions.  They come in two *halves*, even and odd dimensions, whose
neighbours already share a register.

*Values* are summed over columns, so neighbours come from two words.  They come in four
*planes*, dimensions ``i``, ``i + 4``, ``i + 8`` and so on, one for each byte of a word, and
every plane has an accumulator of its own.

bf16 rows come in as many parts, of dimensions in order, so that there is one algorithm.
(One byte at a time, sm_86 spends 128 single-byte loads and 256 conversions at a quarter of
the rate on a tile of 64 rows: as long as the products themselves.)

**int8** ``x``, its sign bit flipped, is ``x + 128`` in 0..255.  In the lower half of fp16's
bits, below an exponent of zero, it reads as ``(x + 128) * 2^-24``, a subnormal number, which
matrix units take as any other.  What 128 adds to a sum of products ``f * x`` is
``128 * sum(f)``, taken off in fp32 (``offset_of``).  It is at most a few times
as large as the sum of such products with random signs, so a few units of fp32's 24 bits go.

**e4m3** is decoded as ``e4m3.py`` says, times 144; NaN is infinity.  A query becomes fp16 by dividing it by a
power of two near its largest number, which changes no bit of any number within 2^-17 of
that, whatever the size of the model's norms.
"""

from vllm.triton_utils import tl, triton

from .e4m3 import halves as e4m3_halves
from .e4m3 import scaled


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
    """Which dimensions each plane of values holds: four times ``[DIM / 4]``."""
    at = tl.arange(0, DIM // 4)
    if FORM == "bf16":
        return at, at + DIM // 4, at + DIM // 2, at + DIM // 4 * 3
    else:
        return 4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3


@triton.jit
def load_keys(base, offsets, valid, flip, FORM: tl.constexpr, DIM: tl.constexpr):
    """Two halves ``[n, DIM / 2]`` of the keys at ``offsets``; zeros where not ``valid``.

    ``base`` points to bf16, or to int32 words of four one-byte numbers; ``flip``: of
    ``sign_bits``.  What is left to multiply says ``unscale``.
    """
    there = valid[:, None]
    if FORM == "bf16":
        at = (base + tl.arange(0, DIM // 2))[None, :] + offsets[:, None]
        return tl.load(at, mask=there, other=0), tl.load(at + DIM // 2, mask=there, other=0)
    else:
        at = (base + tl.arange(0, DIM // 4))[None, :] + offsets[:, None]
        return halves(tl.load(at, mask=there, other=0), flip, FORM)


@triton.jit
def load_values(base, offsets, valid, flip, FORM: tl.constexpr, DIM: tl.constexpr):
    """Four planes ``[n, DIM / 4]`` of the values at ``offsets``; else as ``load_keys``."""
    there = valid[:, None]
    at = (base + tl.arange(0, DIM // 4))[None, :] + offsets[:, None]
    first = tl.load(at, mask=there, other=0)
    if FORM == "bf16":
        return (
            first,
            tl.load(at + DIM // 4, mask=there, other=0),
            tl.load(at + DIM // 2, mask=there, other=0),
            tl.load(at + DIM // 4 * 3, mask=there, other=0),
        )
    else:
        return planes(first, flip, FORM)


@triton.jit
def sign_bits(numbers):
    """0x00800080 as ``[1, 1]``, from a pointer to some number below 2^30.

    The compiler must not know it.  Mask and flip are one operation if one of their two
    constants is in a register, and given two constants it makes two, for every 64 bytes.
    As a load it can also be moved to where operands are, which a scalar cannot.
    """
    return tl.where(tl.load(numbers + tl.zeros((1, 1), tl.int32)) >= 2**30, 0, 0x00800080)


@triton.jit
def _masked(words, flip, FORM: tl.constexpr):
    """int32 words -> bits of fp16: of bytes 0 and 2, and of bytes 1 and 3."""
    if FORM == "fp8":
        return e4m3_halves(words)
    else:
        return (words & 0x00FF00FF) ^ flip, ((words >> 8) & 0x00FF00FF) ^ flip


@triton.jit
def halves(words, flip, FORM: tl.constexpr):
    """int32 words ``[n, w]`` -> fp16 ``[n, 2 w]`` of even and of odd bytes."""
    even, odd = _masked(words, flip, FORM)
    return _both(even, FORM), _both(odd, FORM)


@triton.jit
def planes(words, flip, FORM: tl.constexpr):
    """int32 words -> fp16 of their four bytes, the lowest first."""
    even, odd = _masked(words, flip, FORM)
    return _lower(even, FORM), _lower(odd, FORM), _lower(even >> 16, FORM), _lower(odd >> 16, FORM)


@triton.jit
def _both(bits, FORM: tl.constexpr):
    pair = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
    return _number(tl.reshape(pair, (bits.shape[0], 2 * bits.shape[1])), FORM)


@triton.jit
def _lower(bits, FORM: tl.constexpr):
    return _number(bits.to(tl.int16), FORM)


@triton.jit
def _number(bits, FORM: tl.constexpr):
    x = bits.to(tl.float16, bitcast=True)
    if FORM == "fp8":
        return scaled(x)
    else:
        return x


@triton.jit
def unscale(FORM: tl.constexpr):
    """What operands leave to multiply, of keys and of values."""
    if FORM == "fp8":
        return 1.0 / 144.0
    elif FORM == "int8":
        return 16777216.0
    else:
        return 1.0


@triton.jit
def offset_of(factors):
    """What the 128 in int8 operands ``[.., n]`` adds to products with ``factors`` ``[rows, n]``, to be added: ``[rows]``."""
    return tl.sum(factors.to(tl.float32), axis=1) * (-128.0 / 16777216.0)


@triton.jit
def load_query(
    base, stride_head, first_head, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr
):
    """One row's queries of one group, as keys are: two halves ``[BLOCK_M, DIM / 2]``.

    Also the power of two, ``[BLOCK_M]``, that each query was divided by, and what has to
    be added to its products with keys.
    """
    heads = tl.arange(0, BLOCK_M)
    at = base + ((first_head + heads) * stride_head)[:, None]
    mine = (heads < GROUP)[:, None]
    bias = tl.zeros((BLOCK_M,), tl.float32)
    if FORM == "bf16":
        half = tl.arange(0, DIM // 2)[None, :]
        q = tl.load(at + half, mask=mine, other=0.0), tl.load(at + half + DIM // 2, mask=mine, other=0.0)
        return q, tl.full((BLOCK_M,), 1.0, tl.float32), bias
    else:
        # In whole rows until the last step, when a row is eight neighbours of each lane of a warp: its largest and
        # its sum take five exchanges. Loaded as halves, every second number, they took most of a thousand
        # instructions, a quarter of all that a program of decode had.
        whole = tl.load(at + tl.arange(0, DIM)[None, :], mask=mine, other=0.0).to(tl.float32)
        power, inverse = power_below(tl.max(tl.abs(whole), axis=1))
        whole = (whole * inverse[:, None]).to(tl.float16)
        if FORM == "int8":
            bias = offset_of(whole)
        return tl.split(tl.reshape(whole, (BLOCK_M, DIM // 2, 2))), power, bias


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
