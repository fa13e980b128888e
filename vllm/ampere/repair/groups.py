# SPDX-License-Identifier: Apache-2.0
"""quantization_config of compressed-tensors, with each group's targets taken from the tensors."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.declared import Names, groups, scheme_of
from vllm.ampere.checkpoint.storage import Storage

Key = tuple[int, int, bool]  # bits, group size (-1 per channel), symmetric


def correct(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    """Rewrite config_groups and ignore in `config`; returns a sentence for each change."""
    raw = _holder(config)
    if raw is None or checkpoint.declared.method != "compressed-tensors":
        return []
    there = [_declared(group) for group in _integer_groups(raw).values()]
    packed = _packed(checkpoint, there)
    if not packed:
        return []
    said = []
    targets = _targets(checkpoint, packed)
    made: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for key in sorted(targets, key=lambda key: there.index(key) if key in there else len(there)):
        patterns = targets[key]
        name, group = _group_for(key, raw, made)
        group["targets"] = patterns
        made[name] = group
        taken.add(name)
        said.append(f"config_groups.{name}: {_said(key)} for {', '.join(pattern[3:] for pattern in patterns)}")
    # Groups of other kinds (FP8, NVFP4, attention) are kept as they are.
    kept = {name: group for name, group in raw["config_groups"].items() if name not in _integer_groups(raw)}
    for name in raw["config_groups"]:
        if name not in taken and name not in kept:
            said.append(f"config_groups.{name}: removed, no tensor is of its scheme")
    order = [*raw["config_groups"], *made]
    raw["config_groups"] = dict(sorted((made | kept).items(), key=lambda item: order.index(item[0])))
    return said + _ignore(raw, set(packed))


def _holder(config: dict[str, Any]) -> dict[str, Any] | None:
    for place in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place.get(key), dict):
                return place[key]
    return None


def _integer_groups(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: group for name, group in groups(raw).items() if group["weights"].get("type", "int") == "int"}


def _packed(checkpoint: Checkpoint, there: list[Key]) -> dict[str, Key]:
    """Modules that are stored packed and whole; those with a fault of their own are left to their findings."""
    return {
        name: _key(storage, there)
        for name, storage in checkpoint.storages.items()
        if storage.kind == "pack" and not storage.fault and checkpoint.modules[name].kind != "ngram_table"
    }


def _key(storage: Storage, there: list[Key]) -> Key:
    """A single scale may stand for all inputs, or for a group that happens to be as large: whichever is declared."""
    key = storage.bits, storage.group, storage.symmetric
    as_group = storage.bits, storage.inputs, storage.symmetric
    return as_group if storage.group == -1 and key not in there and as_group in there else key


def _declared(group: dict[str, Any]) -> Key:
    scheme = scheme_of(group["weights"], "")
    return scheme.bits, scheme.group, scheme.symmetric


def _targets(checkpoint: Checkpoint, packed: dict[str, Key]) -> dict[Key, list[str]]:
    """Patterns for each scheme: one for a kind of module that is all alike, else one for each module."""
    kinds: dict[str, dict[Key | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, module in checkpoint.modules.items():
        kinds[module.template][packed.get(name)].append(name)
    made: dict[Key, list[str]] = defaultdict(list)
    for template, schemes in kinds.items():
        for key, names in schemes.items():
            if key is not None:
                made[key] += [_pattern(template)] if len(schemes) == 1 else map(_pattern, names)
    return made


def _pattern(name: str) -> str:
    """Matches the module under every prefix; `*` stands for a number."""
    return "re:.*" + re.escape(name).replace(r"\*", r"\d+") + "$"


def _group_for(key: Key, raw: dict[str, Any], made: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The group that declares this scheme; one made after the first, where none does."""
    there = _integer_groups(raw)
    for name, group in there.items():
        if name not in made and _declared(group) == key:
            return name, copy.deepcopy(group)
    number = next(n for n in range(1000) if f"group_{n}" not in there and f"group_{n}" not in made)
    pattern = copy.deepcopy(next(iter(there.values()), {"weights": {"type": "int"}, "input_activations": None}))
    bits, group, symmetric = key
    pattern["weights"] |= {
        "num_bits": bits,
        "group_size": None if group == -1 else group,
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
    }
    return f"group_{number}", pattern


def _ignore(raw: dict[str, Any], packed: set[str]) -> list[str]:
    """Take out what would leave a packed module unquantized."""
    wrong = [name for name in raw.get("ignore") or () if any(map(Names.of([(name, True)]).find, packed))]
    if wrong:
        raw["ignore"] = [name for name in raw["ignore"] if name not in wrong]
    return [f"ignore: {name} removed, its tensors are packed" for name in wrong]


def _said(key: Key) -> str:
    bits, group, symmetric = key
    return f"INT{bits}" + (" per channel" if group == -1 else f" g{group}") + ("" if symmetric else " with zero points")
