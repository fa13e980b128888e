# SPDX-License-Identifier: Apache-2.0
"""What packed integer weights stand for.

A row of ``n`` integers of ``bits`` bits is one bit string in 32-bit words: value ``i``
begins at bit ``i * bits`` and may lie across two words.  Stored integers are unsigned;
``2 ** (bits - 1)`` less gives the symmetric ones.  A weight is integer times scale, one
scale for every group of inputs of each output.

compressed-tensors keeps ``[outputs, words]`` and ``[outputs, groups]``.  gptqmodel keeps
both transposed, and its words run along the inputs as well.  Here everything is in the
first form, with any number of dimensions in front (experts).
"""

import torch


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unsigned integers out of their words.

    Args:
        packed: int32 ``[..., words]`` with ``words >= ceil(count * bits / 32)``.
        bits: 1 to 8.
        count: integers in a row.

    Returns int16 ``[..., count]``, each in ``[0, 2 ** bits)``.

    """
    start = torch.arange(count, device=packed.device) * bits
    word, shift = start // 32, start % 32
    # The sign bit is a value bit like the others, hence the detour over 64 bits.
    words = packed.long() & 0xFFFFFFFF
    following = (word + 1).clamp(max=packed.shape[-1] - 1)
    both = words[..., word] | (words[..., following] << 32)
    return ((both >> shift) & ((1 << bits) - 1)).to(torch.int16)


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    inputs: int,
    dtype: torch.dtype,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight that packed integers stand for.

    Args:
        packed: int32 ``[..., outputs, words]``.
        scale: ``[..., outputs, groups]``.
        bits: width of an integer.
        inputs: integers in a row.
        dtype: of the result; the product is taken in float32 and rounded once.
        zero_point: unsigned ``[..., outputs, groups]``; None is the middle of the range.

    Returns ``[..., outputs, inputs]``.

    """
    groups = scale.shape[-1]
    values = unpack(packed, bits, inputs).float().unflatten(-1, (groups, -1))
    if zero_point is None:
        values = values - (1 << (bits - 1))
    else:
        values = values - zero_point.float().unsqueeze(-1)
    return (values * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)
