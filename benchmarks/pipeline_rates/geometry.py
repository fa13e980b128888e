"""A model directory with the real widths and no weights."""

from __future__ import annotations

import json
from pathlib import Path

from demo.checkpoint.sparse import write_file

#: Rows of the real n-gram table and values of each; DESIGN's geometry, as upstream computes it from the configuration.
TABLE_ROWS, ROW_VALUES = 320_001_536, 160


def write(folder: Path, config: Path, layers: int, experts: int) -> Path:
    """`config` with so many layers and experts, and its table as a file that is as long as the real one and all holes.

    Reading a hole costs what reading a cached page costs, and no disk is asked: rows are as fast as they can be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    geometry = json.loads(config.read_text()) | {"num_hidden_layers": layers, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(geometry))
    layer = geometry["ple_layer_ids"][0] - 1
    name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.weight"
    write_file(folder / "model.safetensors", {name: ("BF16", (TABLE_ROWS, ROW_VALUES))})
    return folder
