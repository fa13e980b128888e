"""What `quantization_config` says of a module, read as vLLM reads it: of groups with one target the last counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.ampere.checkpoint.documents import CONFIG
from vllm.ampere.checkpoint.errors import ConfigValueUnusable
from vllm.ampere.checkpoint.geometry import LINEAR, Part

#: names under which one module may be listed
_FORMS = ("model.", "model.language_model.", "", "language_model.model.")


@dataclass(frozen=True)
class Scheme:
    """Bits of a weight, inputs per scale (-1: all of them), and the target that said so."""

    bits: int
    group: int
    symmetric: bool = True
    target: str = ""

    def __str__(self) -> str:
        return f"INT{self.bits}" + (" per channel" if self.group == -1 else f" g{self.group}")


@dataclass(frozen=True)
class Names:
    """A list of layer names and `re:` patterns; class names such as "Linear" are kept apart."""

    exact: dict[str, Any] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern, Any], ...] = ()
    linear: Any = None
    #: answers by `template`, where no pattern names a number: 70,000 experts are then three questions
    known: dict[str, Any] | None = None

    @classmethod
    def of(cls, items: Iterable[tuple[str, Any]]) -> Names:
        exact: dict[str, Any] = {}
        patterns: dict[str, Any] = {}
        linear = None
        for name, value in items:
            if name == "Linear":
                linear = value
            elif name.startswith("re:"):
                patterns[name[3:]] = value
            else:
                exact[name] = value
        numbered = any(re.search(r"\d", text.replace(r"\d", "")) for text in patterns)
        compiled = tuple((_compiled(text), value) for text, value in patterns.items())
        return cls(exact, compiled, linear, None if numbered else {})

    def find(self, module: str, template: str = "") -> Any:
        """The value for a canonical module name, None if it is not listed. `linear` is left to the caller."""
        if self.exact:
            for form in _FORMS:
                if (value := self.exact.get(form + module)) is not None:
                    return value
        if self.known is None or not template:
            return self._match(module)
        if template not in self.known:
            self.known[template] = self._match(module)
        return self.known[template]

    def _match(self, module: str) -> Any:
        for form in _FORMS:
            name = form + module
            for pattern, value in self.patterns:
                if pattern.match(name):
                    return value
        return None


def _compiled(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error:
        # vLLM would stop at it; here it matches nothing, which shows as a contradiction.
        return re.compile(r"(?!)")


@dataclass(frozen=True)
class Declared:
    """A quantization config.

    Attributes:
        method: "compressed-tensors", "gptq", "auto-round", "fp8", "modelopt", …; "" without one
        raw: the object itself
        per_module: whether `scheme` can be held against the tensors. Of AutoRound's own format it only helps to read
            them: its rules for single layers are looser than what is understood here
    """

    method: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    targets: Names = field(default_factory=Names)
    ignored: Names = field(default_factory=Names)

    @property
    def per_module(self) -> bool:
        return self.method in ("compressed-tensors", "gptq")

    @property
    def by_tensors(self) -> bool:
        """Whether which modules are quantized is taken from the tensors, and only the scheme from here."""
        return self.method in ("gptq", "auto-round")

    def scheme(self, module: str, part: Part | None, template: str = "") -> Scheme | None:
        """The scheme of a canonical module name; None if it says that the module is not quantized."""
        if self.ignored.find(module, template):
            return None
        if (found := self.targets.find(module, template)) is not None:
            return found or None
        if part is None or part.kind != LINEAR:
            return None
        # "Linear" is matched against the names of vLLM's classes, and that of the lm_head does not contain it.
        return None if module == "lm_head" else self.targets.linear


def declared(config: dict[str, Any], modelopt: dict[str, Any] | None) -> Declared:
    """From config.json, or the file of NVIDIA's exporter.

    Raises:
        ConfigValueUnusable: an entry is of a type that it cannot have
    """
    try:
        return _declared(config, modelopt)
    except (TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigValueUnusable(f"{CONFIG}, quantization_config", "names, numbers and objects", found) from error


def _declared(config: dict[str, Any], modelopt: dict[str, Any] | None) -> Declared:
    for holder in (config, config.get("text_config") or {}):
        raw = holder.get("quantization_config") or holder.get("compression_config")
        if isinstance(raw, dict):
            break
    else:
        raw = (modelopt or {}).get("quantization", modelopt)
        if not isinstance(raw, dict):
            return Declared()
    method = str(raw.get("quant_method") or ("modelopt" if modelopt else "")).replace("_", "-")
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method in ("gptq", "auto-round"):
        return _gptq(method, raw)
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
        target: scheme_of(group["weights"], target)
        for group in groups(raw).values()
        for target in group.get("targets") or ()
        if group["weights"].get("type", "int") == "int"
    }
    ignored = Names.of((name, True) for name in raw.get("ignore") or ())
    return Declared("compressed-tensors", raw, Names.of(found.items()), ignored)


def _gptq(method: str, raw: dict[str, Any]) -> Declared:
    bits, group = int(raw.get("bits") or 0), int(raw.get("group_size") or -1)
    base = Scheme(bits, group, bool(raw.get("sym", True)), "bits, group_size")
    listed: dict[str, Scheme] = {"lm_head": base} if raw.get("lm_head") else {}
    ignored: list[tuple[str, bool]] = []
    for pattern, changes in (raw.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignored.append((f"re:{pattern[2:]}", True))
        else:
            listed[f"re:{pattern.removeprefix('+:')}"] = _changed(base, changes, pattern)
    for name, changes in (raw.get("extra_config") or {}).items():
        if int(changes.get("bits", bits)) >= 16:
            ignored.append((name, True))
        else:
            listed[name] = _changed(base, changes, name)
    targets = Names.of(listed.items())
    return Declared(method, raw, replace(targets, linear=base), Names.of(ignored))


def _changed(base: Scheme, changes: dict[str, Any], target: str) -> Scheme:
    return Scheme(
        int(changes.get("bits", base.bits)),
        int(changes.get("group_size", base.group)),
        bool(changes.get("sym", base.symmetric)),
        target,
    )
