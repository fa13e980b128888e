# SPDX-License-Identifier: Apache-2.0
"""Which documents change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.documents import CONFIG, GENERATION_CONFIG, INDEX
from vllm.ampere.finding import Finding
from vllm.ampere.findings.schemes import SchemeContradicted, SharedTarget
from vllm.ampere.repair import config as config_file
from vllm.ampere.repair import groups, index


@dataclass(frozen=True)
class Plan:
    """New documents by file name, and a sentence for each change: (file name, what)."""

    documents: dict[str, dict[str, Any]]
    changes: list[tuple[str, str]]


def plan(checkpoint: Checkpoint, found: list[Finding], sampling: dict[str, Any] | None) -> Plan:
    """What to write. `sampling` goes into the generation config, over what is there."""
    documents: dict[str, dict[str, Any]] = {}
    changes: list[tuple[str, str]] = []

    def change(name: str, document: dict[str, Any], said: list[str]) -> None:
        if said:
            documents[name] = document
            changes.extend((name, sentence) for sentence in said)

    config = copy.deepcopy(checkpoint.config)
    said = config_file.correct(checkpoint, config)
    if any(isinstance(finding, SharedTarget | SchemeContradicted) for finding in found):
        said += groups.correct(checkpoint, config)
    change(CONFIG, config, said)
    if rebuilt := index.correct(checkpoint):
        change(INDEX, *rebuilt)
    if sampling:
        generation = dict(checkpoint.generation_config or {}) | sampling
        change(GENERATION_CONFIG, generation, [f"{key}: {value!r} added" for key, value in sampling.items()])
    return Plan(documents, changes)
