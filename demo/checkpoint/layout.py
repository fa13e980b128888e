"""The published layout, as a check that a written checkpoint really has it.

The published files hold one tensor per expert and projection and the n-gram table in `split_ngram_parts` shards,
spread over several safetensors files with an index.  transformers fuses both while loading and splits them again in
`save_pretrained`; should a later release stop doing so, the demonstration would prove less than it says.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"\.ple\.ple_embedding\.ngram_embedding\.shard_(\d+)\.weight$")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")


class LayoutError(ValueError):
    """A checkpoint that is not in the published layout."""


@dataclass(frozen=True)
class Layout:
    files: int
    tensors: int
    table_shards: int
    table_rows: int
    table_bytes: int
    expert_tensors: int
    total_bytes: int


def read_layout(checkpoint: Path) -> Layout:
    """Count what is in the files; raises `LayoutError` where the layout is another one."""
    config = json.loads((checkpoint / "config.json").read_text())
    index_file = checkpoint / INDEX
    if not index_file.is_file():
        raise LayoutError(f"{index_file}: missing; the published checkpoint is split over several files")
    weight_map: dict[str, str] = json.loads(index_file.read_text())["weight_map"]

    shards: dict[str, set[int]] = {}
    experts: set[str] = set()
    table_rows = table_bytes = total = 0
    for file in sorted(set(weight_map.values())):
        total += (checkpoint / file).stat().st_size
        with safe_open(checkpoint / file, "pt") as handle:
            for name in handle.keys():
                if weight_map.get(name) != file:
                    raise LayoutError(f"{file}: holds {name}, but the index says {weight_map.get(name)}")
                if shard := _SHARD.search(name):
                    rows, width = handle.get_slice(name).get_shape()
                    shards.setdefault(name[: shard.start()], set()).add(int(shard[1]))
                    table_rows += rows
                    table_bytes += rows * width * 2
                elif _EXPERT.search(name):
                    experts.add(name)
                elif "ngram_embedding.weight" in name or ".experts.gate_up_proj" in name:
                    raise LayoutError(f"{name}: fused, where the published checkpoint has single tensors")

    parts = config["split_ngram_parts"]
    for layer_id in config["ple_layer_ids"]:
        prefix = f"model.layers.{layer_id - 1}"
        if shards.get(prefix) != set(range(parts)):
            raise LayoutError(f"{prefix}: expected table shards 0..{parts - 1}, found {sorted(shards.get(prefix, ()))}")
    expected = config["num_hidden_layers"] * config["num_experts"] * 3
    if len(experts) != expected:
        raise LayoutError(f"expected {expected} expert tensors, found {len(experts)}")
    return Layout(
        files=len(set(weight_map.values())),
        tensors=len(weight_map),
        table_shards=sum(map(len, shards.values())),
        table_rows=table_rows,
        table_bytes=table_bytes,
        expert_tensors=len(experts),
        total_bytes=total,
    )
