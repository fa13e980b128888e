# SPDX-License-Identifier: Apache-2.0
"""Stored rows and queries as operands of the matrix units.

The matrix units take numbers of 16 bits two to a register, and bytes four: neighbours
along the axis that is summed over, dimensions of keys and columns of values.  One byte
at a time, an sm_86 would spend as long on loads and conversions as on the products.  So
rows of one byte are loaded two bytes at a time, ``pairs``: matrices of 16-bit numbers
can be transposed as they come from shared memory, and a register then holds a pair of
one row and the same pair of the next.  A mask makes two operands of it, for the even and
for the odd dimensions.  Rows are two such *planes* therefore; those of bf16 are two as
well, of dimensions in order, so that there is one algorithm.

**int8 keys** are operands as they are, of the integer products.  A query comes in two
pieces, ``q = unit * (256 * upper + lower)``, whose products are exact in int32: 2^22 at
most, times 256, is below 2^31.  ``unit`` is 2^-14 of the power of two below the query's
largest number, so numbers within 2^-6 of that keep every bit that bf16 has, and what
others lose is half a unit at most: less than a largest number's own last bit by 2^6.
(One unit where rounding would leave int8's range: above 127.49 * 256 units.)

**int8 values** ``x``, the sign bit flipped, are ``x + 128`` in 0..255.  In the lower half
of fp16's bits, below an exponent of zero, that reads as ``(x + 128) * 2^-24``, a
subnormal number, which matrix units take as any other.  What 128 adds to a sum of
products ``f * x`` is ``128 * sum(f)``, taken off in fp32 (``offset_of``).  It is at most a
few times as large as the sum of such products with random signs, so a few units of
fp32's 24 bits go.

**e4m3** is decoded as ``e4m3.py`` says, times 144; NaN is infinity.  A query becomes fp16
by dividing it by a power of two near its largest number, which changes no bit of any
number within 2^-17 of that, whatever the size of the model's norms.
"""

from vllm.triton_interpreter import interprets
from vllm.triton_utils import tl, triton

from .e4m3 import apart as e4m3_apart
from .e4m3 import scaled
from .pairs import two_of_each

INTERPRETED = tl.constexpr(interprets())
# Of two bytes, their sign bits flipped.
_LIFTED = tl.constexpr("""{
    .reg .b32 shifted;
    lop3.b32 $0, $2, 0x00FF00FF, 0x00800080, 0x6A;
    shr.u32 shifted, $2, 8;
    lop3.b32 $1, shifted, 0x00FF00FF, 0x00800080, 0x6A;
}""")


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
def exponent_of(x):
    """``e`` for ``x >= 0`` with ``2^e <= x < 2^(e + 1)``, in fp32, at least -100; 128 for NaN and infinity."""
    # Beside 2^23, fp32's last place is one, and exponents are biased by 127.
    biased = ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23) | 0x4B000000
    return tl.maximum(biased.to(tl.float32, bitcast=True) - (8388608.0 + 127.0), -100.0)


@triton.jit
def plane_dims(FORM: tl.constexpr, DIM: tl.constexpr):
    """Which dimensions each plane holds: twice ``[DIM / 2]``."""
    at = tl.arange(0, DIM // 2)
    if FORM == "bf16":
        return at, at + DIM // 2
    else:
        return 2 * at, 2 * at + 1


@triton.jit
def load_keys(base, offsets, valid, FORM: tl.constexpr, DIM: tl.constexpr):
    """Keys at ``offsets`` as ``products`` takes them; zeros where not ``valid``.

    ``base`` points to bf16, or to int32 words of four one-byte numbers.
    """
    if FORM == "int8":
        pairs = _pairs(base, offsets, valid, DIM)
        # The same bits: no instruction comes of it.
        bytes_ = tl.join(pairs.to(tl.int8), (pairs >> 8).to(tl.int8))
        return tl.reshape(bytes_, (pairs.shape[0], DIM))
    else:
        return load_values(base, offsets, valid, FORM, DIM)


@triton.jit
def load_values(base, offsets, valid, FORM: tl.constexpr, DIM: tl.constexpr):
    """Two planes ``[n, DIM / 2]`` of the values at ``offsets``; else as ``load_keys``.

    What is left to multiply says ``unscale``.
    """
    if FORM == "bf16":
        at, there = (base + tl.arange(0, DIM // 2))[None, :] + offsets[:, None], valid[:, None]
        return tl.load(at, mask=there, other=0), tl.load(at + DIM // 2, mask=there, other=0)
    else:
        return planes(_pairs(base, offsets, valid, DIM), FORM)


@triton.jit
def load_scales(keys, values, offsets, valid, LAYOUT: tl.constexpr):
    """fp32 scales of keys and of values at ``offsets``; zeros where not ``valid``."""
    if LAYOUT.paired_scales:
        # One read of a line, and half the copies, where two would wait for host memory apart.
        at = (keys + offsets).to(tl.pointer_type(tl.int64), bitcast=True)
        both = tl.load(at, mask=valid, other=0)
        return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return tl.load(keys + offsets, mask=valid, other=0.0), tl.load(values + offsets, mask=valid, other=0.0)


@triton.jit
def _pairs(base, offsets, valid, DIM: tl.constexpr):
    """int16 ``[n, DIM / 2]`` of two bytes each; keys and values in one shape, so that addresses are shared too."""
    at = (base.to(tl.pointer_type(tl.int16), bitcast=True) + tl.arange(0, DIM // 2))[None, :]
    return tl.load(at + (2 * offsets)[:, None], mask=valid[:, None], other=0)


@triton.jit
def planes(pairs, FORM: tl.constexpr):
    """int16 of two bytes each -> fp16 of the lower and of the upper ones."""
    if FORM == "fp8":
        lower, upper = e4m3_apart(pairs, INTERPRETED)
        return scaled(lower), scaled(upper)
    elif INTERPRETED:
        lower, upper = (pairs & 0xFF) ^ 0x80, ((pairs >> 8) & 0xFF) ^ 0x80
        return lower.to(tl.float16, bitcast=True), upper.to(tl.float16, bitcast=True)
    else:
        return two_of_each(pairs, _LIFTED)


@triton.jit
def products(q, k, FORM: tl.constexpr):
    """``[rows, n]`` in fp32: queries of ``as_operands`` by keys of ``load_keys``, in the unit of the former."""
    if FORM == "int8":
        keys = tl.trans(k)
        upper, lower = tl.dot(q[0], keys, out_dtype=tl.int32), tl.dot(q[1], keys, out_dtype=tl.int32)
        # A difference: the compiler takes a sum with a product for one longer chain of products, each of which waits for
        # the one before it.
        return (lower - upper * -256).to(tl.float32)
    else:
        one, other = tl.dot(q[0], tl.trans(k[0])), tl.dot(q[1], tl.trans(k[1]))
        if FORM == "fp8":
            # Two chains here too, as the compiler leaves such a sum alone: an H200 reads prompts in 1,164 us instead of
            # 1,216. bf16's are no faster so (1,188 and 1,179), and keep one.
            return tl.math.fma(one, tl.full(one.shape, 1.0, tl.float32), other)
        return one + other


@triton.jit
def unscale(FORM: tl.constexpr):
    """What planes leave to multiply."""
    if FORM == "fp8":
        return 1.0 / 144.0
    elif FORM == "int8":
        return 16777216.0
    else:
        return 1.0


@triton.jit
def offset_of(factors):
    """What the 128 in int8 planes adds to products with factors of this sum, to be added."""
    return factors * (-128.0 / 16777216.0)


@triton.jit
def load_query(
    base, stride_head, first_head, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr
):
    """One row's queries of one group, bf16, as ``as_operands`` takes them."""
    heads = tl.arange(0, BLOCK_M)
    mine = (heads < GROUP)[:, None]
    at = base + ((first_head + heads) * stride_head)[:, None]
    if FORM == "bf16":
        half = tl.arange(0, DIM // 2)[None, :]
        return tl.load(at + half, mask=mine, other=0.0), tl.load(at + half + DIM // 2, mask=mine, other=0.0)
    else:
        # In whole rows until the last step, when a row is eight neighbours of each lane of a warp: its largest takes
        # five exchanges, and several hundred instructions where every second number is loaded.
        return (tl.load(at + tl.arange(0, DIM)[None, :], mask=mine, other=0.0),)


@triton.jit
def as_operands(query, FORM: tl.constexpr):
    """What ``load_query`` loaded, as ``products`` takes it, and its unit ``[BLOCK_M]``: products with keys are in that."""
    if FORM == "bf16":
        return query, tl.full((query[0].shape[0],), 1.0, tl.float32)
    elif FORM == "int8":
        return _pieces(query[0])
    else:
        whole = query[0].to(tl.float32)
        power, inverse = power_below(tl.max(tl.abs(whole), axis=1))
        whole = (whole * inverse[:, None]).to(tl.float16)
        return tl.split(tl.reshape(whole, (whole.shape[0], whole.shape[1] // 2, 2))), power * unscale(FORM)


@triton.jit
def _pieces(q):
    """bf16 ``[rows, DIM]`` -> ``(upper, lower)`` int8, and ``unit`` ``[rows]``: NaN if a number is none, or above 2^101."""
    # As integers infinity is above all numbers, and NaN above infinity.
    q = q.to(tl.float32)
    largest = tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    power, inverse = power_below(largest.to(tl.float32, bitcast=True))
    # Beside 1.5 * 2^23, fp32's last place is one: the adder rounds, and its two lower bytes are those of the integer.
    scale = tl.broadcast_to((inverse * 16384.0)[:, None], q.shape)
    number = tl.math.fma(q, scale, tl.full(q.shape, 12582912.0, tl.float32))
    number = tl.minimum(number.to(tl.int32, bitcast=True), 0x4B400000 + 32639)
    # The lower byte counts from -128, so the upper one is the next of what is half of it or more.
    lower, upper = number.to(tl.int8), ((number + 128) >> 8).to(tl.int8)
    return (upper, lower), tl.where(largest < 228 << 23, power * (1.0 / 16384.0), float("nan"))


@triton.jit
def load_planes(base, rows, stride, there, FORM: tl.constexpr, DIM: tl.constexpr):
    """Planes of rows of ``DIM`` numbers that are ``stride`` apart; zeros where not ``there``."""
    dims = plane_dims(FORM, DIM)
    at, there = base + (rows * stride)[:, None], there[:, None]
    return (
        tl.load(at + dims[0][None, :], mask=there, other=0.0),
        tl.load(at + dims[1][None, :], mask=there, other=0.0),
    )


@triton.jit
def store_planes(base, rows, stride, there, planes, FORM: tl.constexpr, DIM: tl.constexpr):
    """The reverse of ``load_planes``; rows that are not ``there`` are not written."""
    dims = plane_dims(FORM, DIM)
    at, there = base + (rows * stride)[:, None], there[:, None]
    tl.store(at + dims[0][None, :], planes[0], mask=there)
    tl.store(at + dims[1][None, :], planes[1], mask=there)
