# SPDX-License-Identifier: Apache-2.0
"""What a quantization config can say of a module, whatever its method."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.ampere.checkpoint.geometry import LINEAR, Part

#: names under which one module may be listed
FORMS = ("model.", "model.language_model.", "", "language_model.model.")


@dataclass(frozen=True)
class Scheme:
    """Bits of a weight, inputs per scale (-1: all of them), and the target that said so.

    Attributes:
        kind: "int"; "fp8", whose group is 0 for one scale in all and -1 for one per output; "nvfp4"; or "" for a
            format that is not held against the tensors
        blocks: of FP8, outputs and inputs that share a scale; empty where groups say it
        scales: the tensors that such a weight has beside it
    """

    bits: int
    group: int
    symmetric: bool = True
    target: str = ""
    kind: str = "int"
    blocks: tuple[int, ...] = ()
    scales: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "fp8":
            form = {0: "one scale", -1: "a scale per channel"}.get(self.group, "")
            return "FP8, " + (f"a scale per {self.blocks[0]} x {self.blocks[1]} block" if self.blocks else form)
        if self.kind == "nvfp4":
            return f"NVFP4 g{self.group}"
        return f"INT{self.bits}" + (" per channel" if self.group == -1 else f" g{self.group}")


#: said of a module whose format is not held against its tensors
UNREAD = Scheme(0, 0, kind="")


class Listing(Protocol):
    """Names of modules, and what is said of each."""

    linear: Any

    def find(self, module: str, template: str = "") -> Any:
        """The value for a canonical module name, None if it is not listed; False says "not quantized"."""


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
        rules = tuple((compiled(text), value) for text, value in patterns.items())
        return cls(exact, rules, linear, None if numbered else {})

    def find(self, module: str, template: str = "") -> Any:
        """The value for a canonical module name, None if it is not listed. `linear` is left to the caller."""
        if self.exact:
            for form in FORMS:
                if (value := self.exact.get(form + module)) is not None:
                    return value
        return remembered(self.known, template, lambda: self._match(module))

    def _match(self, module: str) -> Any:
        for form in FORMS:
            name = form + module
            for pattern, value in self.patterns:
                if pattern.match(name):
                    return value
        return None


def remembered(known: dict[str, Any] | None, template: str, match: Callable[[], Any]) -> Any:
    """What `match` says, asked once for a template; every time where `known` is None or there is no template."""
    if known is None or not template:
        return match()
    if template not in known:
        known[template] = match()
    return known[template]


def compiled(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error:
        # vLLM would stop at it; here it matches nothing, which shows as a contradiction.
        return re.compile(r"(?!)")


#: projections whose classes take every quantization method
_BUILT = re.compile(
    r"\.mlp\.(experts\.\d+|shared_expert)\.(gate|up|down)_proj$|\.self_attn\.[qkvo]_proj$"
    r"|\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"
)
#: sparse attention's; the draft module is built by another config
QKV = re.compile(r"^layers\.\d+\.self_attn\.[qkv]_proj$")


@dataclass(frozen=True)
class Declared:
    """A quantization config.

    Attributes:
        method: "compressed-tensors", "gptq", "auto-round", "fp8", "modelopt", …; "" without one
        raw: the object itself
        per_module: whether `scheme` can be held against the tensors
    """

    method: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    targets: Listing = field(default_factory=Names)
    ignored: Listing = field(default_factory=Names)

    @property
    def per_module(self) -> bool:
        return self.method in ("compressed-tensors", "gptq", "auto-round", "fp8", "modelopt")

    @property
    def plain_attention(self) -> bool:
        """Whether q, k and v of sparse attention are built in 16 bits, whatever is said of them: of a model that is
        ModelOpt's NVFP4 as a whole.
        """
        algorithm = str(self.raw.get("quant_algo") or "").upper()
        return self.method == "modelopt" and algorithm in ("NVFP4", "W4A16_NVFP4")

    def may_be_plain(self, module: str) -> bool:
        """Whether a module that is said to be quantized may be in BF16 all the same.

        gptqmodel's module list is taken from the tensors, and AutoRound lists what it left. Of FP8 and ModelOpt only
        the large projections are certain to be built as the config says: others have no method of these.
        """
        if self.method in ("fp8", "modelopt"):
            return not _BUILT.search(module) or (self.plain_attention and bool(QKV.search(module)))
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
