# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: tensors that fit one another, and a config that says what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.declared import Scheme, groups
from vllm.ampere.checkpoint.geometry import LINEAR
from vllm.ampere.checkpoint.read import Module
from vllm.ampere.checkpoint.storage import Storage, words
from vllm.ampere.finding import WARN, Finding
from vllm.ampere.repeated_targets import repeated_targets


class PackedShapeWrong(Finding):
    what = "A packed weight has a width that no number of bits gives"
    remedy = "Config and weights are not of one model, or the export is damaged."


class ScaleShapeWrong(Finding):
    what = "A weight's scales do not fit the weight"
    remedy = "Export again; scales and weights are of different exports."


class ScaleMissing(Finding):
    what = "A quantized weight has no scales"
    remedy = "Download the whole checkpoint, or export again."


class GroupDoesNotDivide(Finding):
    what = "A group size does not divide a layer's inputs"
    remedy = "Quantize the layer with a group that does (320 inputs: 64, 32 or per channel) or leave it in BF16."


class SharedTarget(Finding):
    what = "Groups of the quantization config have one target, and the last one is not what the tensors are"
    remedy = "vllm ampere check --repair OUT writes each group with the layers that it fits."


class SharedTargetUnused(Finding):
    severity = WARN
    what = "Groups of the quantization config have one target, of which only the last counts"
    remedy = "The tensors fit the last one, so nothing is read wrongly; remove the others."


class SchemeContradicted(Finding):
    what = "The quantization config says of a layer what its tensors are not"
    remedy = "Correct the config, or export again; for compressed-tensors vllm ampere check --repair OUT does."


class PackedWithGaps(Finding):
    what = "Weights are packed with unused bits in every word"
    remedy = (
        "compressed-tensors up to 0.17 packs 3, 5, 6 and 7 bits so; with zero points they are read only as 0.18 and later "
        "pack them, without gaps. Export again with that."
    )


class PackedWithGapsRepacked(Finding):
    severity = WARN
    what = "Weights are packed with unused bits in every word"
    remedy = "They are repacked while they load. Exported again with compressed-tensors 0.18 or later they are smaller on disk."


class FusedPartsDiffer(Finding):
    what = "Layers that are computed as one are stored differently"
    remedy = "Quantize all parts alike, or none: they share one scheme."


class RouterQuantized(Finding):
    what = "A router is quantized"
    remedy = "It picks the experts and is built in BF16; export again with mlp.gate and shared_expert_gate left out."


class ActivationOrder(Finding):
    what = "The weights are in activation order"
    remedy = "Quantize again with desc_act false (actorder static or weight): vLLM reads no other order of groups."


_FAULTS = {
    "packed": PackedShapeWrong,
    "scale": ScaleShapeWrong,
    "no scale": ScaleMissing,
    "group": GroupDoesNotDivide,
}
#: parts of one matrix product, by the end of the first one's name
_FUSED = {
    ".self_attn.q_proj": ("k_proj", "v_proj"),
    ".shared_expert.gate_proj": ("up_proj",),
    ".linear_attn.in_proj_qkv": ("in_proj_z",),
    ".linear_attn.in_proj_a": ("in_proj_b",),
    ".ple.key_proj": ("value_proj",),
}


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors by themselves, then against the config; one finding for each kind of module."""
    yield from _order(checkpoint)
    yield from _tensors(checkpoint)
    yield from _missing_scales(checkpoint)
    yield from _fused(checkpoint)
    yield from _declared_groups(checkpoint)
    if checkpoint.declared.per_module or not checkpoint.declared.method:
        yield from _contradictions(checkpoint)


def _order(checkpoint: Checkpoint) -> Iterator[Finding]:
    raw = checkpoint.declared.raw
    if checkpoint.declared.method == "gptq" and raw.get("desc_act"):
        yield ActivationOrder("config.json, quantization_config.desc_act", "false", "true")
    for name, group in groups(raw).items():
        order = group["weights"].get("actorder")
        if order in ("group", "dynamic", True):
            yield ActivationOrder(f"config.json, config_groups.{name}.weights.actorder", "static or null", repr(order))


def is_router(module: Module) -> bool:
    return module.kind == "router" or module.template.endswith(".mlp.shared_expert_gate")


def _tensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    seen: set[tuple[str, str]] = set()
    gaps: dict[type[Finding], list[tuple[str, Storage]]] = {}
    for name, module in checkpoint.modules.items():
        if module.kind == "ngram_table":
            continue
        storage = checkpoint.storages[name]
        if is_router(module) and storage.kind not in ("plain", "other") and (module.template, "") not in seen:
            seen.add((module.template, ""))
            yield RouterQuantized(name, "BF16, F16 or F32", str(storage))
        if storage.loose:
            kind = PackedWithGapsRepacked if storage.repackable else PackedWithGaps
            gaps.setdefault(kind, []).append((name, storage))
        if storage.fault and (module.template, storage.fault) not in seen:
            seen.add((module.template, storage.fault))
            suffix, expected, found = storage.detail
            yield _FAULTS[storage.fault](f"{name}.{suffix}", expected, found)
    for kind, found in gaps.items():
        name, storage = found[0]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        expected = (
            f"{words(storage.inputs, storage.bits, False)} words a row ({storage.bits} bits, {storage.inputs} inputs)"
        )
        yield kind(name + more, expected, f"{words(storage.inputs, storage.bits, True)}")


def _fused(checkpoint: Checkpoint) -> Iterator[Finding]:
    storages = checkpoint.storages
    seen: set[tuple[str, str]] = set()
    for name, module in checkpoint.modules.items():
        if module.kind == "experts":
            # All experts of a layer are one; the first projection of the first one stands for them.
            first = f"{name[: name.index('.experts.')]}.experts.0.gate_proj"
            others = (name,) if first in storages else ()
        else:
            end = next((end for end in _FUSED if name.endswith(end)), None)
            first = name
            others = tuple(f"{name.rpartition('.')[0]}.{leaf}" for leaf in _FUSED[end]) if end else ()
        for other in others:
            if other not in storages or _alike(storages[first], storages[other]):
                continue
            key = (module.template, str(storages[other]))
            if key not in seen:
                seen.add(key)
                yield FusedPartsDiffer(f"{first} and {other}", "one scheme", f"{storages[first]} and {storages[other]}")


def _alike(one: Storage, other: Storage) -> bool:
    """Whether two parts can share a scheme; a part with a fault of its own is reported as that."""
    if one.fault or other.fault:
        return True
    group, others = _group(one.group, one), _group(other.group, other)
    return (one.kind, one.bits, group, one.symmetric) == (other.kind, other.bits, others, other.symmetric)


def _declared_groups(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Groups that cannot be, where the tensors do not show it (they may have been rounded or left out)."""
    seen: set[tuple[str, int]] = set()
    for name, part in checkpoint.parts.items():
        if part.kind != LINEAR or name not in checkpoint.modules:
            continue
        storage = checkpoint.storages[name]
        scheme = _scheme(checkpoint, name, storage)
        if scheme is None or scheme.group <= 0 or storage.kind not in ("pack", "gptq") or storage.fault:
            continue
        module = checkpoint.modules[name]
        if part.shape[1] % scheme.group and (module.template, scheme.group) not in seen:
            seen.add((module.template, scheme.group))
            # The tensors' own group may divide; then what is declared is wrong, and said so below.
            if storage.group == scheme.group:
                yield GroupDoesNotDivide(name, f"a divisor of {part.shape[1]} inputs", f"group_size {scheme.group}")


def _scheme(checkpoint: Checkpoint, name: str, storage: Storage) -> Scheme | None:
    if storage.kind == "plain" and checkpoint.declared.may_be_plain(name):
        return None
    return checkpoint.schemes[name]


#: kinds of storage -> what a config calls them; of others nothing is said
_FAMILY = {"pack": "int", "gptq": "int", "awq": "int", "fp8": "fp8", "nvfp4": "nvfp4"}


def contradicts(scheme: Scheme | None, storage: Storage) -> bool:
    """Whether a layer read by `scheme` would not be the layer that is stored."""
    if storage.kind not in ("plain", *_FAMILY) or (scheme is not None and not scheme.kind):
        return False
    if scheme is None:
        return storage.kind != "plain"
    if storage.kind == "plain" or _FAMILY[storage.kind] != scheme.kind:
        return True
    if scheme.kind == "fp8":
        return _scales(scheme, storage) != (storage.blocks or (1 if storage.group == 0 else storage.outputs, 1))
    return (scheme.bits, _group(scheme.group, storage)) != (storage.bits, _group(storage.group, storage))


def _scales(scheme: Scheme, storage: Storage) -> tuple[int, ...]:
    """How many scales along outputs and inputs an FP8 weight has by `scheme`."""
    if scheme.blocks:
        return tuple(-(-size // side) for size, side in zip((storage.outputs, storage.inputs), scheme.blocks))
    return (storage.outputs if scheme.group == -1 else 1, 1)


def _missing_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors beside a weight that its format has by the config, and that its dtypes do not show."""
    seen: set[str] = set()
    for name, module in checkpoint.modules.items():
        scheme, storage = checkpoint.schemes[name], checkpoint.storages[name]
        if scheme is None or not scheme.scales or storage.fault or module.template in seen:
            continue
        if storage.kind == "plain" or contradicts(scheme, storage):
            continue
        for suffix in scheme.scales:
            if suffix not in module.tensors:
                seen.add(module.template)
                there = ", ".join(sorted(other for other in module.tensors if "scale" in other)) or "no scale"
                yield ScaleMissing(f"{name}.{suffix}", f"{scheme} (quantization_config)", f"only {there}")


def _group(group: int, storage: Storage) -> int:
    """One group of all inputs is the same as one per channel."""
    return storage.inputs if group == -1 else group


def _contradictions(checkpoint: Checkpoint) -> Iterator[Finding]:
    repeated = repeated_targets(groups(checkpoint.declared.raw))
    wrong: dict[tuple[str, str, str], list[str]] = {}
    lost: dict[str, list[str]] = {target: [] for target in repeated}
    kinds: dict[str, Counter[str]] = {target: Counter() for target in repeated}
    for name, part in checkpoint.parts.items():
        module = checkpoint.modules.get(name)
        if module is None or name.startswith("mtp."):
            continue
        storage = checkpoint.storages[name]
        # A router is built in full precision whatever the config says.
        if storage.fault or is_router(module):
            continue
        scheme = _scheme(checkpoint, name, storage)
        if part.kind != LINEAR and scheme is None and storage.kind == "plain":
            continue
        if contradicts(scheme, storage):
            # A quantized vocabulary matches no "Linear": for want of a name of its own it is lost with the others.
            target = scheme.target if scheme else "Linear"
            if target in lost:
                lost[target].append(name)
                kinds[target][f"{module.template} is {storage}"] += 1
            else:
                key = (module.template, str(scheme or "not quantized"), storage.exactly)
                wrong.setdefault(key, []).append(name)
    for target, names in lost.items():
        yield _shared(checkpoint, target, repeated[target], names, kinds[target])
    for (_, expected, found), names in wrong.items():
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        yield SchemeContradicted(f"{names[0]}{more}", f"{expected} (quantization_config)", found)


def _shared(checkpoint: Checkpoint, target: str, names: list[str], layers: list[str], kinds: Counter) -> Finding:
    found = groups(checkpoint.declared.raw)
    place = f"config.json, config_groups {', '.join(names)}, target {target!r}"
    last = f"{_said(found[names[-1]])} for all of them (the last, {names[-1]})"
    if not layers:
        return SharedTargetUnused(place, "one group for a target", last)
    (example, _), *_ = kinds.most_common(1)
    return SharedTarget(place, last, f"{len(layers)} layers of {len(kinds)} kinds that are not: {example}, …")


def _said(group: dict) -> str:
    weights = group["weights"]
    return str(Scheme(int(weights.get("num_bits") or 0), int(weights.get("group_size") or -1)))
