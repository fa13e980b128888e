"""A model directory with the real widths, no weights, and a table that is really there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.ple_reads.files import LAYER, random_table
from vllm.ampere.checkpoint.config import text_config
from vllm.ampere.checkpoint.table import table_rows
from vllm.models.qwen4_exp.ple_store.flat.writer import flatten


def write(folder: Path, config: Path, layers: int, experts: int, rows: int) -> tuple[Path, Path, int]:
    """`config` with so many layers and experts, and a table of about `rows` random rows in shards and in a flat file.

    Returns: the model directory, the flat file, and the table's rows.
    """
    made = json.loads(config.read_text())
    text = made.get("text_config", made)
    heads = (text.get("ngram_size", 3) - 1) * text.get("heads_per_ngram", 8)
    text |= {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": rows // heads,
        "split_ngram_parts": 8,
    }
    text.pop("layer_types", None)
    known = text_config(made)
    count = table_rows(known, 0)
    table = random_table(folder / "model", "bf16", count, known.ple_embed_dim // known.ngram_heads)
    (folder / "model" / "config.json").write_text(json.dumps(made))
    flat = folder / "table.flat"
    flatten(table, LAYER, table.rows.dim, flat)
    return folder / "model", flat, count
