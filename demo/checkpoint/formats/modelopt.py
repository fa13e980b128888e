"""NVFP4 as ModelOpt writes it: e2m1 numbers two to a byte, an e4m3 scale for 16 of them, a float32 scale over those.

`input_scale` is for cards that multiply in four bits; weight-only kernels leave it alone.
"""

from collections.abc import Iterable

import torch

GROUP = 16
#: What the lower three bits of a code stand for; the fourth is the sign.
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_LARGEST = 448.0


def overall(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """The scale over the scales, float32 [], for weights that share one: a fused product's parts have to."""
    return torch.stack([weight.abs().max() for weight in weights]).max().float() / (SIZES[-1] * _E4M3_LARGEST)


def rounded(weight: torch.Tensor, over: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [outputs, inputs / 2], the even input in the lower half; scales e4m3 [outputs, inputs / 16]; and the
    numbers that they stand for with `over`, float32 [outputs, inputs].
    """
    outputs, inputs = weight.shape
    grouped = weight.float().view(outputs, inputs // GROUP, GROUP)
    scale = (grouped.abs().amax(-1) / SIZES[-1] / over).to(torch.float8_e4m3fn)
    wide = scale.float()[..., None] * over
    sizes = torch.tensor(SIZES, device=weight.device)
    middles = (sizes[1:] + sizes[:-1]) / 2
    # A group of zeros has a scale of zero: its codes are zero too.
    size = torch.bucketize((grouped / wide).nan_to_num(0.0).abs(), middles)
    code = (size | (grouped < 0).long() << 3).view(outputs, inputs).to(torch.uint8)
    numbers = (sizes[size] * torch.where(grouped < 0, -1.0, 1.0) * wide).view(outputs, inputs)
    return code[:, ::2] | code[:, 1::2] << 4, scale, numbers


def packed(weight: torch.Tensor, over: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of one module, and the bfloat16 weight [outputs, inputs] that they stand for.

    `weight` and `weight_scale` as of `rounded`; `weight_scale_2`, which is `over`, and `input_scale` float32 [].
    """
    codes, scale, numbers = rounded(weight, over)
    tensors = {
        "weight": codes,
        "weight_scale": scale,
        "weight_scale_2": over.clone(),
        "input_scale": torch.ones((), device=weight.device),
    }
    return tensors, numbers.to(torch.bfloat16)


def config(unquantized: list[str]) -> dict:
    """`quantization` of hf_quant_config.json; `unquantized` are the linear modules that stay in bfloat16."""
    return {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": GROUP,
        "exclude_modules": unquantized,
    }
