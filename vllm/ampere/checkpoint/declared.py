# SPDX-License-Identifier: Apache-2.0
"""What `quantization_config` says of a module, read as vLLM reads it: of groups with one target the last counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.ampere.checkpoint.autoround import auto_round
from vllm.ampere.checkpoint.documents import CONFIG
from vllm.ampere.checkpoint.errors import ConfigValueUnusable
from vllm.ampere.checkpoint.floats import fp8, modelopt
from vllm.ampere.checkpoint.scheme import UNREAD, Declared, Names, Scheme

__all__ = ["Declared", "Names", "Scheme", "declared", "groups", "scheme_of"]


def declared(config: dict[str, Any], modelopt_file: dict[str, Any] | None) -> Declared:
    """From config.json, or the file of NVIDIA's exporter.

    Raises:
        ConfigValueUnusable: an entry is of a type that it cannot have
    """
    try:
        return _declared(config, modelopt_file)
    except (TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigValueUnusable(f"{CONFIG}, quantization_config", "names, numbers and objects", found) from error


def _declared(config: dict[str, Any], modelopt_file: dict[str, Any] | None) -> Declared:
    for holder in (config, config.get("text_config") or {}):
        raw = holder.get("quantization_config") or holder.get("compression_config")
        if isinstance(raw, dict):
            break
    else:
        raw = (modelopt_file or {}).get("quantization", modelopt_file)
        if not isinstance(raw, dict):
            return Declared()
    method = str(raw.get("quant_method") or ("modelopt" if modelopt_file else "")).replace("_", "-")
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method == "gptq":
        return _gptq(raw)
    if method in ("auto-round", "intel/auto-round", "inc"):
        return auto_round(raw)
    if method == "fp8":
        return fp8(raw)
    if method.startswith("modelopt"):
        return modelopt(raw)
    return Declared(method, raw)


def groups(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The config groups of a compressed-tensors config that have weights."""
    found = raw.get("config_groups")
    if not isinstance(found, dict):
        return {}
    return {name: group for name, group in found.items() if isinstance(group, dict) and group.get("weights")}


def scheme_of(weights: dict[str, Any], target: str) -> Scheme:
    """From the `weights` of a config group."""
    group = weights.get("group_size")
    return Scheme(int(weights.get("num_bits") or 0), int(group or -1), bool(weights.get("symmetric", True)), target)


def _compressed_tensors(raw: dict[str, Any]) -> Declared:
    found = {
        target: scheme_of(group["weights"], target) if group["weights"].get("type", "int") == "int" else UNREAD
        for group in groups(raw).values()
        for target in group.get("targets") or ()
    }
    ignored = Names.of((name, True) for name in raw.get("ignore") or ())
    return Declared("compressed-tensors", raw, Names.of(found.items()), ignored)


def _gptq(raw: dict[str, Any]) -> Declared:
    bits, group = int(raw.get("bits") or 0), int(raw.get("group_size") or -1)
    base = Scheme(bits, group, bool(raw.get("sym", True)), "bits, group_size")
    listed: dict[str, Scheme] = {"lm_head": base} if raw.get("lm_head") else {}
    ignored: list[tuple[str, bool]] = []
    for pattern, changes in (raw.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignored.append((f"re:{pattern[2:]}", True))
        else:
            listed[f"re:{pattern.removeprefix('+:')}"] = _changed(base, changes, pattern)
    targets = Names.of(listed.items())
    return Declared("gptq", raw, replace(targets, linear=base), Names.of(ignored))


def _changed(base: Scheme, changes: dict[str, Any], target: str) -> Scheme:
    return Scheme(
        int(changes.get("bits", base.bits)),
        int(changes.get("group_size", base.group)),
        bool(changes.get("sym", base.symmetric)),
        target,
    )
