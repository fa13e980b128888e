"""gptqmodel's layout: `qweight`, `qzeros`, `scales` and `g_idx` in place of `weight`, all with the inputs first.

Format "gptq" (v1) stores a zero point less one, so that the zero point 8 of symmetric four-bit integers is 7.  Scales
are float16 whatever the model is in.
"""

import re

import torch

from demo.checkpoint.formats.recipes import Recipe
from demo.checkpoint.formats.rounding import Rounded, Scheme
from vllm.utils.packed_words import pack_rows

SCALE_DTYPE = torch.float16


def tensors(rounded: Rounded) -> dict[str, torch.Tensor]:
    """Tensors of one module, by the last part of their name."""
    scheme = rounded.scheme
    outputs, inputs = rounded.values.shape
    zeros = torch.full((inputs // scheme.group, outputs), scheme.offset - 1, device=rounded.values.device)
    return {
        # [inputs / 8, outputs]: the words run along the inputs
        "qweight": pack_rows(rounded.values.int() + scheme.offset, scheme.bits).t().contiguous(),
        # [groups, outputs / 8]: here they run along the outputs
        "qzeros": pack_rows(zeros, scheme.bits),
        "scales": rounded.scale.t().contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // scheme.group,
    }


def config(recipe: Recipe) -> dict:
    """`quantization_config` of config.json, and the whole of quantize_config.json.

    The last rule's scheme is the base; rules with another one become `dynamic` overrides.  Those name the part of the
    model that holds the modules: an engine that fuses q, k and v asks about a module that is in no list.
    """
    base = recipe.rules[-1].scheme
    dynamic = {
        rf"+:.*\.{_holder(rule.pattern)}.*": _overrides(rule.scheme, base)
        for rule in recipe.rules
        if rule.scheme != base
    }
    return {
        "bits": base.bits,
        "group_size": base.group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "dynamic": dynamic or None,
        "meta": {
            "quantizer": ["gptqmodel:5.0.0"],
            "damp_percent": 0.05,
            "true_sequential": True,
            "static_groups": False,
        },
    }


def _holder(pattern: str) -> str:
    """`mlp\\.experts` of `mlp\\.experts\\.\\d+\\.(gate|up)_proj`: up to the first part that varies."""
    return re.split(r"\\\.(?=\\d|\(|\[)", pattern)[0]


def _overrides(scheme: Scheme, base: Scheme) -> dict:
    pairs = {"bits": (scheme.bits, base.bits), "group_size": (scheme.group, base.group)}
    return {key: value for key, (value, usual) in pairs.items() if value != usual}
