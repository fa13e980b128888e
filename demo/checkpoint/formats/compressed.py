"""compressed-tensors' pack-quantized layout: `weight_packed`, `weight_scale` and `weight_shape` in place of `weight`.

The configuration is made by the library's own classes, so that a field which they stop accepting shows here.
"""

import json

import torch

from demo.checkpoint.formats.recipes import Recipe
from demo.checkpoint.formats.rounding import Rounded
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


def config(recipe: Recipe, unquantized: list[str]) -> dict:
    """`quantization_config` of config.json; `unquantized` are the linear modules that stay in bfloat16."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    groups: dict = {}
    for rule in recipe.rules:
        groups.setdefault(rule.scheme, []).append(f"re:{rule.regex.pattern}")
    made = QuantizationConfig(
        config_groups={
            f"group_{number}": QuantizationScheme(
                targets=targets,
                weights=QuantizationArgs(
                    num_bits=scheme.bits, type="int", symmetric=True, strategy="group", group_size=scheme.group
                ),
                format="pack-quantized",
            )
            for number, (scheme, targets) in enumerate(groups.items())
        },
        format="pack-quantized",
        quantization_status="compressed",
        ignore=unquantized,
    )
    # Through JSON, because the classes hold enumerations.
    return json.loads(made.model_dump_json())
