"""The draft module of the published checkpoints, one layer.

transformers neither writes nor reads it, and an engine without speculative decoding must pass it over.  It holds a
sparse attention layer with its experts, two projections of its own for the token and for the state, and a mixer.

The token's projection passes the embedding on with noise: a token mostly decides the next one here (../weights.py), so
that about half of the drafts are right.  With random numbers none would be, with less noise all: neither tries both
what follows an accepted draft and what follows a rejected one.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.layout import INDEX

LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(self_attn|mlp|attn_hyper_connection|mlp_hyper_connection)\.")


FILE = "mtp.safetensors"


def add(folder: Path) -> None:
    """Give the checkpoint in `folder` a draft module, in bfloat16 and in a file of its own."""
    config_file, index_file = folder / "config.json", folder / INDEX
    config, index = json.loads(config_file.read_text()), json.loads(index_file.read_text())
    model = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    made = tensors(model, config)
    save_file(made, folder / FILE, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(made, FILE)
    index_file.write_text(json.dumps(index, indent=2))
    config_file.write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}, indent=2))


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
        if name == "fc_embedding":
            matrix = torch.eye(hidden) + 1.5 * matrix
        made[f"mtp.{name}.weight"] = matrix.bfloat16()
    made["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    made["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(config["hc_count"] * hidden, dtype=torch.bfloat16)
    return {name: tensor.clone() for name, tensor in made.items()}
