"""A small checkpoint of headers only, to be broken in one way before or after it is written."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.checkpoint import mixes
from demo.checkpoint.sparse import Entry, published, write, write_file

#: the published model's kinds of layers, four of them; widths are multiples of 128, which packing wants
SMALL = mixes.PUBLISHED | {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 128,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "hc_lowrank": 320,
    "ple_embed_dim": 256,
    "ngram_vocab_size_base": 521,
    "split_ngram_parts": 8,
}
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@dataclass
class Draft:
    """A checkpoint before it is written; `mix` is BF16 unless another is given."""

    config: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(SMALL))
    generation: dict[str, Any] | None = field(default_factory=lambda: dict(SAMPLING))
    tensors: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = self.tensors or published(self.config)

    @classmethod
    def mixed(cls, *, shared_target: bool = False) -> Draft:
        """compressed-tensors, with the four groups of `mixes.autoround_mix`."""
        config = copy.deepcopy(SMALL) | {"quantization_config": mixes.autoround_config(shared_target=shared_target)}
        return cls(config, tensors=published(config, mixes.autoround_mix))

    @classmethod
    def gptq(cls, group: int = 128) -> Draft:
        config = copy.deepcopy(SMALL) | {"quantization_config": mixes.gptq_config(group)}
        return cls(config, tensors=published(config, mixes.gptq_mix(group)))

    @classmethod
    def multimodal(cls) -> Draft:
        """The text config nested, and the layers under `model.language_model.`."""
        text = copy.deepcopy(SMALL)
        config = {
            "model_type": "qwen4_exp",
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "text_config": text,
            "vision_config": {"model_type": "qwen4_exp_vision", "depth": 1, "hidden_size": 64},
            "image_token_id": 5,
        }
        tensors = published(config, prefix="model.language_model.")
        tensors["model.visual.blocks.0.attn.qkv.weight"] = ("BF16", (192, 64))
        return cls(config, tensors=tensors)

    def write(self, out: Path, *, files: int = 3) -> Path:
        write(out, self.config, self.tensors, files=files)
        if self.generation is not None:
            (out / "generation_config.json").write_text(json.dumps(self.generation))
        return out


def edit_json(path: Path, change) -> None:
    """Load, `change` in place, and write back."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def first_file(out: Path) -> Path:
    return sorted(out.glob("*.safetensors"))[0]


def edit_header(path: Path, change) -> None:
    """Change a header and leave the size of the data as it is."""
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + length :])


__all__ = ["SAMPLING", "SMALL", "TABLE", "Draft", "edit_header", "edit_json", "first_file", "write_file"]
