# SPDX-License-Identifier: Apache-2.0
"""The index, from what the files hold."""

from __future__ import annotations

from typing import Any

from vllm.ampere.checkpoint import Checkpoint


def correct(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]] | None:
    """A new index and what changed; None where the present one is right, or there is none."""
    before = checkpoint.weight_map
    if before is None:
        return None
    # Entries of files that are not there or cannot be read stay: nothing is known of them.
    unread = {*checkpoint.absent, *(name for name, shard in checkpoint.shards.items() if not shard.tensors)}
    after = {name: file for name, file in before.items() if file in unread}
    # Of a tensor in two files the one that the index had chosen stays.
    for name, tensor in checkpoint.tensors():
        if name not in after or before.get(name) == tensor.file:
            after[name] = tensor.file
    if after == before:
        return None
    index = dict(checkpoint.index or {})
    index["metadata"] = dict(index.get("metadata") or {})
    index["metadata"]["total_size"] = sum(tensor.bytes for _, tensor in checkpoint.tensors())
    index["weight_map"] = dict(sorted(after.items()))
    moved = sum(name in before and before[name] != file for name, file in after.items())
    counts = {
        "added": len(after.keys() - before.keys()),
        "removed": len(before.keys() - after.keys()),
        "given their right file": moved,
    }
    return index, [f"weight_map: {n} tensors {what}" for what, n in counts.items() if n]
