# SPDX-License-Identifier: Apache-2.0
"""e4m3 as arithmetic on bytes, for GPUs whose Triton has no such type (below sm_89).

A code is ``s eeee mmm``: ``(-1)^s * 2^(eeee-7) * 1.mmm``, or ``2^-6 * 0.mmm`` where
``eeee`` is 0.  There is no infinity; ``s 1111 111`` is NaN; the largest number is 448.

**Decode.**  fp16 is ``s eeeee mmmmmmmmmm`` with bias 15.  Put the sign to bit 15 and
the other seven bits to bits 13..7, and the same bits read as fp16 are the number times
``2^(7-15) = 2^-8``; subnormals included, since both formats step evenly below their
smallest exponent.  For a code in the upper byte of 16 bits that is a shift by one and
two masks, and one register holds two such codes, since 32-bit operations do not care.
The three shifts, masks and unions are the only inline assembly, plain 32-bit ones for any
card: written in Triton, numbers of 16 bits are taken out of their registers first, and
prompts issue 94 instead of 59 instructions a column; in the interpreter they are Triton.

What is left is NaN, whose bits read as 480 * 2^-8.  Times 144 * 2^8 that is 69120, which
fp16 has as infinity, while the largest number's is 64512.  All others are exact as well:
144 is 9 * 16, and four bits times four are eight of fp16's eleven.  So NaN becomes infinity
by the one multiplication that there is; comparing costs several times that, since integers
of 16 bits are not compared in pairs.  A sum of products with infinity is infinite or NaN,
and zero times it is NaN: the caller adds that to what it computes.

The factor of 144 is left to the caller, who has a scale to multiply anyway.

**Encode** saturates: a number beyond 448 becomes 448.  e4m3 has no infinity, and the
NaN that a plain conversion gives for 449 would end the request.  NaN stays NaN.
Rounding is to nearest, ties to even.
"""

import torch

from vllm.triton_utils import tl, triton

from .pairs import two_of_each

LARGEST = 448.0
# Of operands.
SCALE = 144.0
_APART = tl.constexpr("""{
    .reg .b32 number, sign;
    shl.b32 number, $2, 7;
    shl.b32 sign, $2, 8;
    and.b32 number, number, 0x3F803F80;
    lop3.b32 $0, sign, 0x80008000, number, 0xEA;
    shr.u32 number, $2, 1;
    and.b32 number, number, 0x3F803F80;
    lop3.b32 $1, $2, 0x80008000, number, 0xEA;
}""")


@triton.jit
def spread(codes, NUMBER: tl.constexpr, SIGN: tl.constexpr):
    """Integers of two codes for every 16 bits -> bits of fp16 of the lower and of the upper ones.

    ``NUMBER`` and ``SIGN``: 0x3F80 and 0x8000, as often as they fit, as signed integers.
    """
    return ((codes << 7) & NUMBER) | ((codes << 8) & SIGN), ((codes >> 1) & NUMBER) | (codes & SIGN)


@triton.jit
def apart(pairs, INTERPRETED: tl.constexpr):
    """int16 of two codes each -> bits of fp16 of the lower and of the upper ones."""
    if INTERPRETED:
        lower, upper = spread(pairs, 0x3F80, -0x8000)
        return lower.to(tl.float16, bitcast=True), upper.to(tl.float16, bitcast=True)
    else:
        return two_of_each(pairs, _APART)


@triton.jit
def scaled(x):
    """fp16 of ``apart`` -> the number times ``SCALE``; exact, infinity for NaN."""
    return x * 36864.0


@triton.jit
def infinite_to_nan(x):
    """fp32 numbers, infinity made NaN."""
    return tl.math.fma(x, tl.full(x.shape, 0.0, tl.float32), x)


@triton.jit
def encode(x):
    """float32 -> uint8 code of the nearest number, at most 448 away from zero."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448.0
    # Below 2^-6 codes count steps of 2^-9. Adding 2^14 makes fp32's own last place one
    # such step, so the adder rounds to it, ties to even.
    small = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = small.to(tl.int32, bitcast=True) - 0x46800000
    # Elsewhere the upper bits of fp32 are the code once exponents are rebased by
    # 127 - 7; half of the last kept place, less one unless that place is odd, rounds.
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, subnormal, normal)  # 2^-6
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


def decode_reference(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes -> float32 numbers, unscaled."""
    return code.view(torch.float8_e4m3fn).float()


def encode_reference(x: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes; torch's own conversion saturates by release, hence the clamp."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
