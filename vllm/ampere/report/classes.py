# SPDX-License-Identifier: Apache-2.0
"""Bytes, weights and schemes by class of module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.names import BODY, CLASSES
from vllm.ampere.checkpoint.storage import Storage


@dataclass
class Amount:
    """Modules, their weights, and all bytes of their tensors (scales and zero points included)."""

    modules: int = 0
    weights: int = 0
    bytes: int = 0

    def add(self, weights: int, size: int) -> None:
        self.modules += 1
        self.weights += weights
        self.bytes += size

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights if self.weights else 0.0

    def json(self) -> dict[str, Any]:
        return {
            "modules": self.modules,
            "weights": self.weights,
            "bytes": self.bytes,
            "bits_per_weight": round(self.bits_per_weight, 3),
        }


@dataclass
class ModuleClass:
    """One of CLASSES, and within it one Amount for each scheme, the largest first."""

    name: str
    total: Amount = field(default_factory=Amount)
    schemes: dict[Storage, Amount] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {
            "class": self.name,
            **self.total.json(),
            "schemes": [
                {
                    "scheme": str(storage),
                    "storage": storage.kind,
                    "bits": storage.bits,
                    "group_size": storage.group or None,
                    "unused_bits": storage.loose and 32 % storage.bits != 0,
                    **amount.json(),
                }
                for storage, amount in self.schemes.items()
            ],
        }


def by_class(checkpoint: Checkpoint) -> list[ModuleClass]:
    """All classes that the checkpoint has modules of, in the order of CLASSES."""
    made = {name: ModuleClass(name) for name in CLASSES}
    for name, module in checkpoint.modules.items():
        storage = checkpoint.storages[name]
        found, size = made[module.kind], module.bytes
        # Hash constants and the like are bytes but no weights.
        weights = 0 if storage.kind == "other" else storage.weights
        found.total.add(weights, size)
        found.schemes.setdefault(_form(storage), Amount()).add(weights, size)
    for item in made.values():
        item.schemes = dict(sorted(item.schemes.items(), key=lambda pair: -pair[1].bytes))
    return [item for item in made.values() if item.total.modules]


def _form(storage: Storage) -> Storage:
    """The scheme without the module's own shape."""
    return Storage(storage.kind, storage.bits, storage.group, storage.loose, storage.symmetric)


def body(classes: list[ModuleClass]) -> Amount:
    """What is resident to serve text: all but the n-gram table, the vision tower and the draft module."""
    inside = [item.total for item in classes if item.name in BODY]
    return Amount(*(sum(getattr(item, key) for item in inside) for key in ("modules", "weights", "bytes")))
