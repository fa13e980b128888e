"""NVFP4 as ModelOpt writes it: e2m1 numbers two to a byte, an e4m3 scale for 16 of them, a float32 scale for all."""

from __future__ import annotations

import torch

GROUP = 16
#: What the lower three bits of a code stand for; the fourth is the sign.
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_LARGEST = 448.0


def packed(outputs: int, inputs: int, device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of one module as on disk, and the bfloat16 weight [outputs, inputs] that they stand for.

    `weight` uint8 [outputs, inputs / 2], the even input in the lower half; `weight_scale` e4m3 [outputs, inputs / 16];
    `weight_scale_2` and `input_scale` float32 [1].
    """
    weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
    grouped = weight.view(outputs, inputs // GROUP, GROUP)
    overall = weight.abs().max() / (SIZES[-1] * _E4M3_LARGEST)
    scale = (grouped.abs().amax(-1) / SIZES[-1] / overall).to(torch.float8_e4m3fn)
    wide = scale.float()[..., None] * overall
    sizes = torch.tensor(SIZES, device=device)
    middles = (sizes[1:] + sizes[:-1]) / 2
    # A group of zeros has a scale of zero: its codes are zero too.
    size = torch.bucketize((grouped / wide).nan_to_num(0.0).abs(), middles)
    code = (size | (grouped < 0).long() << 3).view(outputs, inputs).to(torch.uint8)
    plain = (sizes[size] * torch.where(grouped < 0, -1.0, 1.0) * wide).view(outputs, inputs).to(torch.bfloat16)
    tensors = {
        "weight": code[:, ::2] | code[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": overall.view(1),
        "input_scale": torch.ones(1, device=device),
    }
    return tensors, plain
