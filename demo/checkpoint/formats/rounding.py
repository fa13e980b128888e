"""Round to the nearest integer, one scale for a group of a row's inputs."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers of `bits` (2 to 8), one scale for every `group` inputs of each output."""

    bits: int
    group: int

    @property
    def offset(self) -> int:
        """What is added to make the integers unsigned; also the largest magnitude below zero."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class Rounded:
    """`values` int8 [outputs, inputs]; `scale` [outputs, inputs / group] in the dtype that goes to disk."""

    values: torch.Tensor
    scale: torch.Tensor
    scheme: Scheme

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[outputs, inputs]: the exact product, rounded once."""
        scale = self.scale.float().repeat_interleave(self.scheme.group, dim=1)
        return (self.values.float() * scale).to(dtype)


def round_weight(weight: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
    """Quantize `weight` [outputs, inputs]; ValueError where groups do not divide the inputs."""
    outputs, inputs = weight.shape
    if inputs % scheme.group:
        raise ValueError(f"{inputs} inputs are not a multiple of the group size {scheme.group}")
    grouped = weight.float().view(outputs, inputs // scheme.group, scheme.group)
    # The scale is rounded first, and the integers are of the rounded one.  A group of zeros keeps a scale of one.
    scale = (grouped.abs().amax(-1) / (scheme.offset - 0.5)).to(scale_dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = (grouped / scale.float()[..., None]).round().clamp(-scheme.offset, scheme.offset - 1)
    return Rounded(values.to(torch.int8).view(outputs, inputs), scale, scheme)
