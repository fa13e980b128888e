# SPDX-License-Identifier: Apache-2.0
"""Tensors against the config's geometry: there, of the right shape, and of this model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.geometry import BUFFER, LINEAR, Part
from vllm.ampere.checkpoint.names import template
from vllm.ampere.checkpoint.read import Module
from vllm.ampere.finding import WARN, Finding

#: tensors that loaders skip: K/V scales, rotary tables, statistics of the hash, the last mixer's unused injection
_SKIPPED = re.compile(
    r"(q_scale|k_scale|v_scale|kv_scale|inv_freq|token_lookup|hashstats_\w*|hyper_connection_mixer\.block_inject_weight)$"
)
#: all experts of a layer in one tensor, as transformers keeps them in memory
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


class TensorMissing(Finding):
    what = "Tensors that the model needs are not in the files"
    remedy = "Download the whole checkpoint, or take config.json from the model that the weights were made from."


class TensorShapeWrong(Finding):
    what = "A tensor's shape is not what the config calls for"
    remedy = "Config and weights are not of one model."


class NormGroupLost(Finding):
    what = "A norm over residual streams lost its group_size in export"
    remedy = (
        "Its weight has to span all streams (hc_count x hidden_size), each normalised by itself; an exporter that "
        "drops RMSNorm.group_size makes another model. Export again with a fixed exporter."
    )


class TensorUnknown(Finding):
    severity = WARN
    what = "Tensors that this model does not have"
    remedy = "A server may stop at them; they belong to another model or another exporter's layout."


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One finding for each kind of module, however many layers and experts it concerns."""
    yield from _norms(checkpoint)
    fused = {match[1] for name in checkpoint.modules if (match := _FUSED.match(name))}
    if checkpoint.complete:
        yield from _missing(checkpoint, fused)
    yield from _shapes(checkpoint)
    yield from _unknown(checkpoint)


def _optional(name: str, part: Part, fused: set[str]) -> bool:
    if part.kind == BUFFER or name.startswith("mtp."):
        return True
    return bool(fused) and ".mlp.experts." in name and name.rsplit(".", 2)[0] in fused


def _missing(checkpoint: Checkpoint, fused: set[str]) -> Iterator[Finding]:
    there = checkpoint.modules
    ple = [f"layers.{n - 1}.ple." for n in checkpoint.text.ple_layer_ids]
    # A table on another layer is a finding of its own.
    elsewhere = tuple(at for at in ple if not any(name.startswith(at) for name in there))
    lacking: dict[str, list[str]] = {}
    for name, part in checkpoint.parts.items():
        if name not in there and not _optional(name, part, fused) and not name.startswith(elsewhere or "-"):
            lacking.setdefault(template(name), []).append(name)
    total = Counter(map(template, checkpoint.parts)) if lacking else {}
    for shape, names in lacking.items():
        yield TensorMissing(names[0], f"{total[shape]} of {shape}", f"{total[shape] - len(names)}")


def _shapes(checkpoint: Checkpoint) -> Iterator[Finding]:
    seen: set[str] = set()
    for name, part in checkpoint.parts.items():
        module = checkpoint.modules.get(name)
        if module is None or part.grouped or module.template in seen:
            continue
        if wrong := _wrong_shape(checkpoint, module, part):
            seen.add(module.template)
            suffix, expected, found = wrong
            yield TensorShapeWrong(f"{name}{'.' if suffix else ''}{suffix}", expected, found)


def _wrong_shape(checkpoint: Checkpoint, module: Module, part: Part) -> tuple[str, str, str] | None:
    """(suffix, expected, found) where the stored weight is not of the part's shape."""
    storage = checkpoint.storages[module.name]
    if storage.kind in ("pack", "gptq", "awq"):
        # Inputs were taken from the config already: a width that fits nothing is a finding of the scheme's.
        if part.kind == LINEAR and storage.outputs != part.shape[0]:
            suffix = "weight_packed" if storage.kind == "pack" else "qweight"
            return suffix, f"{part.shape[0]} outputs", f"{storage.outputs}"
        return None
    for suffix in ("weight", "weight_packed", ""):
        if tensor := module.tensors.get(suffix):
            expected = part.shape
            if storage.kind in ("nvfp4", "mxfp4"):
                expected = (*part.shape[:-1], part.shape[-1] // 2)
            return None if tensor.shape == expected else (suffix, str([*expected]), str([*tensor.shape]))
    return None


def _norms(checkpoint: Checkpoint) -> Iterator[Finding]:
    seen: set[str] = set()
    for name, part in checkpoint.parts.items():
        module = checkpoint.modules.get(name)
        if not part.grouped or module is None or module.template in seen:
            continue
        tensor = module.tensors.get("weight")
        if tensor is not None and tensor.shape != part.shape:
            seen.add(module.template)
            c = checkpoint.text
            yield NormGroupLost(
                f"{name}.weight", f"[{part.shape[0]}] ({c.hc_count} x {c.hidden_size})", str([*tensor.shape])
            )
    for level, keys in (("", checkpoint.config), ("text_config.", checkpoint.config.get("text_config") or {})):
        if "group_size" in keys and keys["group_size"] != checkpoint.text.hidden_size:
            yield NormGroupLost(
                f"config.json, {level}group_size", str(checkpoint.text.hidden_size), repr(keys["group_size"])
            )


def _unknown(checkpoint: Checkpoint) -> Iterator[Finding]:
    strange: dict[str, list[str]] = {}
    for name, module in checkpoint.modules.items():
        if name in checkpoint.parts or module.kind in ("ngram_table", "vision", "mtp"):
            continue
        # PLE tensors on a layer without PLE are reported with the table.
        if module.kind == "ple" or ".ple." in name or _SKIPPED.search(name) or _FUSED.match(name):
            continue
        strange.setdefault(module.template, []).append(name)
    for shape, names in strange.items():
        yield TensorUnknown(names[0], "only tensors of this model", f"{len(names)} of {shape}")
