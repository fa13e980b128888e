# SPDX-License-Identifier: Apache-2.0
"""AutoRound's own config: one scheme, the blocks that it is for, and single layers by name, ending or pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from vllm.ampere.checkpoint.scheme import FORMS, UNREAD, Declared, Scheme, compiled, remembered

#: a key with one of these is searched for as a pattern
_SPECIAL = frozenset("*+?^$()[]{}|\\")


@dataclass(frozen=True)
class Layers:
    """`extra_config`, and the blocks outside of which nothing is quantized.

    A whole name goes before the end of one, and that before a pattern. Values are schemes, False for 16 bits.
    """

    names: dict[str, Any]
    patterns: tuple[tuple[re.Pattern, Any], ...]
    blocks: tuple[str, ...]
    linear: Scheme
    #: answers of the patterns and blocks by `template`, where none of them names a number
    known: dict[str, Any] | None = field(default=None)

    def find(self, module: str, template: str = "") -> Any:
        """See `scheme.Listing`."""
        # The other forms of a name are ends of these two; longer ends go first.
        for name in (f"model.language_model.{module}", f"language_model.model.{module}") if self.names else ():
            while name:
                if (value := self.names.get(name)) is not None:
                    return value
                name = name.partition(".")[2]
        return remembered(self.known, template, lambda: self._match(module))

    def _match(self, module: str) -> Any:
        names = [form + module for form in FORMS]
        for pattern, value in self.patterns:
            if any(pattern.search(name) for name in names):
                return value
        if self.blocks and not any(name.startswith(self.blocks) for name in names):
            return False
        return None


def auto_round(raw: dict[str, Any]) -> Declared:
    """A config of `quant_method` auto-round."""
    base = _scheme(raw, {}, "bits, group_size")
    entries = {
        str(name): False if int(changes.get("bits", base.bits)) >= 16 else _scheme(raw, changes, str(name))
        for name, changes in (raw.get("extra_config") or {}).items()
    }
    blocks = raw.get("block_name_to_quantize") or raw.get("to_quant_block_names") or ()
    blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else tuple(blocks)
    patterns = {name: value for name, value in entries.items() if _SPECIAL & set(name)}
    numbered = any(re.search(r"\d", text) for text in (*patterns, *blocks))
    found = Layers(
        {name: value for name, value in entries.items() if name not in patterns},
        tuple((compiled(text), value) for text, value in patterns.items()),
        blocks,
        base,
        None if numbered else {},
    )
    return Declared("auto-round", raw, found)


def _scheme(raw: dict[str, Any], changes: dict[str, Any], target: str) -> Scheme:
    said = raw | changes
    kind = str(said.get("data_type") or "int")
    bits, group = int(said.get("bits") or 0), said.get("group_size")
    if kind in ("fp", "fp8") and bits == 8 and isinstance(group, list | tuple) and len(group) == 2:
        return Scheme(8, 0, target=target, kind="fp8", blocks=(int(group[0]), int(group[1])))
    if kind != "int":
        return UNREAD
    return Scheme(bits, int(group or -1), bool(said.get("sym", True)), target)
