"""compressed-tensors' pack-quantized layout: `weight_packed`, `weight_scale` and `weight_shape` in place of `weight`.
And its NVFP4, with `weight_global_scale` in place of the shape, weight-only: no scales of activations.

The configuration is made by the library's own classes, so that a field which they stop accepting shows here.
"""

import json

import torch

from demo.checkpoint.formats.recipes import Recipe
from demo.checkpoint.formats.rounding import Rounded, Scheme
from vllm.utils.packed_words import pack_rows

SCALE_DTYPE = torch.bfloat16


def tensors(rounded: Rounded) -> dict[str, torch.Tensor]:
    """Tensors of one module, by the last part of their name."""
    scheme = rounded.scheme
    return {
        # [outputs, ceil(inputs * bits / 32)]
        "weight_packed": pack_rows(rounded.values.int() + scheme.offset, scheme.bits),
        # [outputs, groups]
        "weight_scale": rounded.scale,
        "weight_shape": torch.tensor(rounded.values.shape),
    }


def nvfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ModelOpt's tensors of one module (`modelopt.packed`) as they are named, and the scale over all as it is meant, here."""
    return {
        "weight_packed": tensors["weight"],
        "weight_scale": tensors["weight_scale"],
        # [1]; scales are divided by it, not multiplied.
        "weight_global_scale": (1 / tensors["weight_scale_2"]).view(1),
    }


def config(recipe: Recipe, unquantized: list[str]) -> dict:
    """`quantization_config` of config.json; `unquantized` are the linear modules that stay in bfloat16."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    def weights(scheme: Scheme) -> QuantizationArgs:
        form = ("float", "tensor_group") if recipe.layout == "nvfp4-pack-quantized" else ("int", "group")
        return QuantizationArgs(
            num_bits=scheme.bits, type=form[0], symmetric=True, strategy=form[1], group_size=scheme.group
        )

    groups: dict = {}
    for rule in recipe.rules:
        groups.setdefault(rule.scheme, []).append(f"re:{rule.regex.pattern}")
    layout = "pack-quantized" if recipe.layout == "compressed-tensors" else recipe.layout
    made = QuantizationConfig(
        config_groups={
            f"group_{number}": QuantizationScheme(targets=targets, weights=weights(scheme), format=layout)
            for number, (scheme, targets) in enumerate(groups.items())
        },
        format=layout,
        quantization_status="compressed",
        ignore=unquantized,
    )
    # Through JSON, because the classes hold enumerations.
    return json.loads(made.model_dump_json())
