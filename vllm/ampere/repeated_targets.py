# SPDX-License-Identifier: Apache-2.0
"""Config groups of compressed-tensors that claim one target with different schemes; a server keeps the last one."""

from __future__ import annotations

from typing import Any

# What a group says about how its layers are stored; the rest of its keys does not change how they are read.
_SCHEME = ("weights", "input_activations", "output_activations", "format")


def repeated_targets(config_groups: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Target to the names of its groups, in their order, for targets whose groups differ in scheme."""
    groups: dict[str, list[str]] = {}
    for name, group in config_groups.items():
        for target in group.get("targets") or ():
            groups.setdefault(target, []).append(name)

    def differ(names: list[str]) -> bool:
        first, *others = ([config_groups[name].get(key) for key in _SCHEME] for name in names)
        return any(other != first for other in others)

    return {target: names for target, names in groups.items() if differ(names)}
