# SPDX-License-Identifier: Apache-2.0
"""config.json: keys moved, names and layer numbers corrected."""

from __future__ import annotations

from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.config import present_name
from vllm.ampere.findings.config import TOP_KEYS
from vllm.ampere.findings.ngram_table import ple_layers


def correct(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    """Change `config` in place; returns a sentence for each change."""
    return [
        *_levels(checkpoint, config),
        *_names(config),
        *_ple_layers(checkpoint, config),
        *_norm_groups(checkpoint, config),
    ]


def _levels(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    said = []
    text = config.get("text_config")
    if not isinstance(text, dict):
        return said
    for key in checkpoint.text.misplaced:
        value = config.pop(key)
        if key in text:
            said.append(f"{key}: {value!r} removed from the top, text_config has {text[key]!r}")
        else:
            text[key] = value
            said.append(f"{key}: moved into text_config")
    for key in TOP_KEYS:
        if key in text and key not in config:
            config[key] = text.pop(key)
            said.append(f"{key}: moved out of text_config")
    return said


def _names(config: dict[str, Any]) -> list[str]:
    said = []
    for at in ("", "text_config.", "vision_config."):
        holder = config.get(at[:-1]) if at else config
        for key in ("model_type", "architectures"):
            old = (holder or {}).get(key)
            new = [*map(present_name, old)] if isinstance(old, list) else old and present_name(old)
            if new != old:
                holder[key] = new
                said.append(f"{at}{key}: {old} is now {new}")
    return said


def _ple_layers(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    there = [layer + 1 for layer in ple_layers(checkpoint)]
    if not there or tuple(there) == checkpoint.text.ple_layer_ids:
        return []
    text = config.get("text_config")
    (text if isinstance(text, dict) else config)["ple_layer_ids"] = there
    return [f"ple_layer_ids: {[*checkpoint.text.ple_layer_ids]} is now {there}, where the tensors are"]


def _norm_groups(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    """A key that no config of this model has; what it stands for follows from hidden_size."""
    said = []
    for holder, at in ((config, ""), (config.get("text_config") or {}, "text_config.")):
        if holder.get("group_size", checkpoint.text.hidden_size) != checkpoint.text.hidden_size:
            said.append(f"{at}group_size: {holder.pop('group_size')!r} removed; norms take hidden_size")
    return said
