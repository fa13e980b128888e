# SPDX-License-Identifier: Apache-2.0
"""Weight files: there, whole, and each tensor once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.documents import INDEX
from vllm.ampere.finding import WARN, Finding


class ShardMissing(Finding):
    what = "The index names a file that is not there"
    remedy = "Download the file; gaps in the numbering of files are fine, names without a file are not."


class TensorTwice(Finding):
    what = "A tensor is in two weight files"
    remedy = "Remove the file that does not belong; a server would use whichever it reads last."


class IndexTensorAbsent(Finding):
    what = "The index names a tensor that its file does not hold"
    remedy = "Take the index that belongs to the files, or have one made: vllm ampere check --repair OUT."


class TensorOutsideIndex(Finding):
    severity = WARN
    what = "A weight file holds tensors that the index does not name"
    remedy = "A server reads them all the same; have the index made again: vllm ampere check --repair OUT."


class FileOutsideIndex(Finding):
    severity = WARN
    what = "A safetensors file is not in the index"
    remedy = "No server reads it; remove it if it is left over from another export."


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What each file's header says of the file, then what files and index say of each other."""
    for shard in checkpoint.shards.values():
        yield from shard.faults
    counts = Counter((checkpoint.weight_map or {}).values())
    for name in checkpoint.absent:
        yield ShardMissing(f"{INDEX}, {name}", f"a file with {counts[name]} tensors", "no such file")
    yield from _twice(checkpoint)
    if checkpoint.weight_map is not None:
        yield from _against_index(checkpoint, checkpoint.weight_map)


def _twice(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One finding for each pair of files, however many tensors they share."""
    homes: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for name, tensor in checkpoint.tensors():
        if name in homes:
            shared.setdefault((homes[name], tensor.file), []).append(name)
        homes[name] = tensor.file
    for (first, second), names in shared.items():
        yield TensorTwice(f"{first} and {second}", "each tensor once", f"{_some(names)} in both")


def _against_index(checkpoint: Checkpoint, weight_map: dict[str, str]) -> Iterator[Finding]:
    lacking: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        shard = checkpoint.shards.get(file)
        # Of a file without a readable header nothing can be said.
        if shard is not None and shard.tensors and name not in shard.tensors:
            lacking.setdefault(file, []).append(name)
    for file, names in lacking.items():
        yield IndexTensorAbsent(f"{INDEX}, {file}", _some(names), f"{len(checkpoint.shards[file].tensors)} others")
    unnamed: dict[str, list[str]] = {}
    for name, tensor in checkpoint.tensors():
        if name not in weight_map:
            unnamed.setdefault(tensor.file, []).append(name)
    for file, names in unnamed.items():
        yield TensorOutsideIndex(f"{INDEX}, {file}", "every tensor of the file", f"{_some(names)} missing")
    for name in checkpoint.strays:
        yield FileOutsideIndex(f"{INDEX}, {name}", "every safetensors file", "not this one")


def _some(names: list[str]) -> str:
    """ "a.b and 3 more"."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
