# SPDX-License-Identifier: Apache-2.0
"""The repaired checkpoint as a directory of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.ampere.checkpoint import Checkpoint, read
from vllm.ampere.finding import Finding
from vllm.ampere.findings import findings
from vllm.ampere.repair.plan import plan


class RepairError(ValueError):
    """Nothing can be written where it was asked for."""


class OutNotEmpty(RepairError):
    """OUT holds something already."""


class OutInSource(RepairError):
    """OUT is the checkpoint, or lies within it."""


class OutUnwritable(RepairError):
    """OUT cannot be made, or not be written to."""


@dataclass(frozen=True)
class Repair:
    """What was written.

    Attributes:
        out: the new directory
        changes: (file, what was changed)
        linked: number of entries that are links to the old directory's
        remaining: what is wrong with the new directory still, and so could not be repaired
    """

    out: Path
    changes: list[tuple[str, str]]
    linked: int
    remaining: list[Finding]


def repair(
    checkpoint: Checkpoint,
    found: list[Finding],
    out: Path,
    sampling: dict[str, Any] | None = None,
    judge: Callable[[Checkpoint], list[Finding]] = findings,
) -> Repair:
    """Write corrected JSON and links into `out`, then check that.

    Args:
        found: the checkpoint's findings
        out: a directory that is empty or does not exist
        sampling: sampling parameters to add to the generation config; they stand in the model's card and nowhere
            in a checkpoint, so none are made up
        judge: what finds the faults of what was written; as `found` was made

    Raises:
        OutNotEmpty, OutInSource, OutUnwritable
    """
    _usable(checkpoint.path, out)
    planned = plan(checkpoint, found, sampling)
    try:
        out.mkdir(parents=True, exist_ok=True)
        linked = _link(checkpoint.path, out, set(planned.documents))
        for name, document in planned.documents.items():
            (out / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OutUnwritable(f"{out} cannot be written: {error.strerror}") from error
    return Repair(out, planned.changes, linked, judge(read(out)))


def _usable(source: Path, out: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise OutInSource(f"{out} lies in the checkpoint; give a directory outside {source}")
    if out.is_dir() and any(out.iterdir()):
        raise OutNotEmpty(f"{out} is not empty; give a new or an empty directory")
    if out.exists() and not out.is_dir():
        raise OutNotEmpty(f"{out} is a file; give a new or an empty directory")


def _link(source: Path, out: Path, without: set[str]) -> int:
    """Link every entry but `without`; returns how many.

    Symbolic links to where the data really is: a snapshot of a hub cache is itself made of links. Where a file system
    has none, hard links.
    """
    linked = 0
    for entry in sorted(source.iterdir()):
        # A link to nothing is a file that is missing, and stays one.
        if entry.name in without or not entry.exists():
            continue
        real = entry.resolve()
        try:
            (out / entry.name).symlink_to(real)
        except (OSError, NotImplementedError):
            os.link(real, out / entry.name)
        linked += 1
    return linked
