# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as one JSON object. Keys are stable: scripts read them."""

from __future__ import annotations

from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.finding import REFUSE, Finding
from vllm.ampere.findings.stored_table import StoredTable
from vllm.ampere.report.classes import body, by_class
from vllm.ampere.report.decode import decode_step
from vllm.ampere.report.stages import stages

#: the verdicts, and the exit status of each
OK, WARNINGS, REFUSED = "ok", "warnings", "refused"
STATUS = {OK: 0, WARNINGS: 0, REFUSED: 1}


def verdict(found: list[Finding]) -> str:
    if any(finding.severity == REFUSE for finding in found):
        return REFUSED
    return WARNINGS if found else OK


def summary(
    checkpoint: Checkpoint,
    found: list[Finding],
    *,
    pipeline_size: int = 0,
    partition: str | None = None,
    flat: StoredTable | None = None,
) -> dict[str, Any]:
    """What the checkpoint holds and what is wrong with it.

    Args:
        found: what `findings` returned
        pipeline_size: stages to describe; 0 for none
        partition: see `stages`
        flat: the flat file that rows of the n-gram table are read from in place of the checkpoint's

    Raises:
        vllm.models.qwen4_exp.partition.PipelineStageError: stages that cannot be
    """
    classes = by_class(checkpoint)
    return {
        "checkpoint": str(checkpoint.path),
        "verdict": verdict(found),
        "format": checkpoint.declared.method or "unquantized",
        "files": len(checkpoint.shards),
        "file_bytes": sum(shard.size for shard in checkpoint.shards.values()),
        "tensors": sum(len(shard.tensors) for shard in checkpoint.shards.values()),
        "layers": checkpoint.text.num_hidden_layers,
        "classes": [item.json() for item in classes],
        "body": body(classes).json(),
        "decode_step": decode_step(checkpoint, classes, flat).json(),
        "ngram_table_file": flat.json() | {"message": str(flat)} if flat else None,
        "stages": stages(checkpoint, pipeline_size, partition, flat) if pipeline_size else None,
        "findings": [as_json(finding) for finding in found],
    }


def as_json(finding: Finding) -> dict[str, str]:
    return {
        "name": finding.name,
        "severity": finding.severity,
        "where": finding.where,
        "expected": finding.expected,
        "found": finding.found,
        "remedy": finding.remedy,
        "message": str(finding),
    }
