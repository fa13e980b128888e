"""The draft module of the published checkpoints, one layer of random numbers.

transformers neither writes nor reads it, and an engine without speculative decoding must pass it over.  It holds a
sparse attention layer with its experts, two projections of its own for the token and for the state, and a mixer.
"""

import re

import torch

LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(self_attn|mlp|attn_hyper_connection|mlp_hyper_connection)\.")


def tensors(model: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """bfloat16 tensors under the published names; the layer is a copy of the first sparse attention layer."""
    sparse = next(i for i, kind in enumerate(config["layer_types"]) if kind != "linear_attention")
    hidden = config["hidden_size"]
    made = {
        f"mtp.layers.0.{name.split(f'layers.{sparse}.', 1)[1]}": tensor
        for name, tensor in model.items()
        if (found := LAYER.match(name)) and int(found[1]) == sparse
    }
    made |= {
        f"mtp.{name[name.index('hyper_connection_mixer') :]}": tensor
        for name, tensor in model.items()
        if "hyper_connection_mixer." in name
    }
    generator = torch.Generator().manual_seed(1)
    for name in ("fc_embedding", "fc_hidden"):
        matrix = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
        made[f"mtp.{name}.weight"] = matrix.bfloat16()
    made["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    made["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(config["hc_count"] * hidden, dtype=torch.bfloat16)
    return {name: tensor.clone() for name, tensor in made.items()}
