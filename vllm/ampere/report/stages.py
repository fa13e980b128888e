# SPDX-License-Identifier: Apache-2.0
"""What each pipeline stage would hold, and which stage each part of the checkpoint lands on."""

from __future__ import annotations

from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.names import layer_of
from vllm.ampere.findings.stored_table import StoredTable


def stages(
    checkpoint: Checkpoint, pipeline_size: int, partition: str | None = None, flat: StoredTable | None = None
) -> list[dict[str, Any]]:
    """One object for each stage: its layers and bytes.

    `resident_bytes` is what a stage holds to serve text and images: without the n-gram table, which may stay on disk,
    and without the draft module, which is loaded for speculative decoding only (with a token embedding of its own).

    Args:
        pipeline_size: as --pipeline-parallel-size
        partition: as VLLM_PP_LAYER_PARTITION; None for that variable, or upstream's default
        flat: the file that is read in place of the n-gram table's shards, and stands for them

    Raises:
        vllm.models.qwen4_exp.partition.PipelineStageError: stages that cannot be
    """
    # Imported here: it brings in torch, and most checks ask for no stages.
    from vllm.models.qwen4_exp.stages import plan_stages

    vision = checkpoint.config.get("vision_config") or {}
    planned = plan_stages(
        checkpoint.text,
        pipeline_size,
        partition=partition,
        deepstack_levels=len(vision.get("deepstack_visual_indexes") or ()),
    )
    home = {layer: stage.index for stage in planned for layer in stage.layers}
    made = [
        {
            "stage": stage.index,
            "first_layer": stage.layers[0],
            "last_layer": stage.layers[-1],
            "gdn_layers": len(stage.gdn_layers),
            "qsa_layers": len(stage.qsa_layers),
            "ple_layers": list(stage.ple_layers),
            "layer_bytes": 0,
            "embedding_bytes": 0,
            "lm_head_bytes": 0,
            "vision_bytes": 0,
            "mtp_bytes": 0,
            "ngram_table_bytes": 0,
        }
        for stage in planned
    ]
    last = len(made) - 1
    for name, module in checkpoint.modules.items():
        stage, key = _place(checkpoint, name, module.kind, home, last)
        made[stage][key] += module.bytes
        # The output, or the draft module, needs the token embedding on its own stage too.
        if module.kind == "embeddings" and last and checkpoint.text.tie_word_embeddings:
            made[last][key] += module.bytes
        elif module.kind == "embeddings" and last and checkpoint.text.mtp_layers:
            made[last]["mtp_bytes"] += module.bytes
    if flat:
        for stage in made:
            stage["ngram_table_bytes"] = flat.bytes if home[flat.layer] == stage["stage"] else 0
    beside = ("ngram_table_bytes", "mtp_bytes")
    for stage in made:
        stage["resident_bytes"] = sum(v for k, v in stage.items() if k.endswith("_bytes") and k not in beside)
    return made


def _place(checkpoint: Checkpoint, name: str, kind: str, home: dict[int, int], last: int) -> tuple[int, str]:
    """(stage, key of its bytes) of a module."""
    layer = layer_of(name)
    if kind == "ngram_table" and layer is not None:
        return home.get(layer, 0), "ngram_table_bytes"
    if layer is not None:
        return home.get(layer, last), "layer_bytes"
    if kind == "vision":
        return 0, "vision_bytes"
    if kind == "mtp":
        return last, "mtp_bytes"
    if kind == "embeddings":
        return 0, "embedding_bytes"
    # The mixer that ends the last layer goes with the lm_head.
    return last, "lm_head_bytes" if kind == "lm_head" else "layer_bytes"
