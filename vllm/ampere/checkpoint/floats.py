# SPDX-License-Identifier: Apache-2.0
"""Configs of floating-point weights: FP8's own, and NVIDIA's ModelOpt, in config.json or a file beside it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vllm.ampere.checkpoint.scheme import FORMS, UNREAD, Declared, Names, Scheme

_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.\d+\.")
#: projection -> the product that it is a part of, under which it may be listed too
_PRODUCT = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_a": "in_proj_ba",
    "in_proj_b": "in_proj_ba",
}


@dataclass(frozen=True)
class Whole:
    """Names that have to be given in full, of a module, of the product it is part of, or of one of a layer's experts.

    vLLM builds a layer's experts as one, and leaves all of them out for one that is listed.
    """

    names: frozenset[str]
    experts: frozenset[str]
    linear: Any = None

    @classmethod
    def of(cls, listed: Any) -> Whole:
        names = frozenset(map(str, listed or ()))
        found = (re.match(r"(.*\.mlp\.experts)(\.|$)", name) for name in names)
        return cls(names, frozenset(match[1] for match in found if match))

    def find(self, module: str, template: str = "") -> Any:
        """True if it is listed; see `scheme.Listing`."""
        if expert := _EXPERT.match(module):
            return True if any(form + expert[1] in self.experts for form in FORMS) else None
        parent, _, leaf = module.rpartition(".")
        names = (module, f"{parent}.{_PRODUCT.get(leaf, leaf)}")
        return True if any(form + name in self.names for form in FORMS for name in names) else None


@dataclass
class Wildcards:
    """ModelOpt's list: whole names, parts of names and shell patterns. One expert stands for a layer's."""

    listed: tuple[str, ...]
    linear: Any = None
    known: dict[str, Any] = field(default_factory=dict)

    def find(self, module: str, template: str = "") -> Any:
        """True if it is listed; see `scheme.Listing`."""
        if expert := _EXPERT.match(module):
            module = f"{expert[1]}.0.{module.rpartition('.')[2]}"
        if module not in self.known:
            names = [form + module for form in FORMS]
            self.known[module] = any(
                text in name or fnmatchcase(name, text) or text.endswith("*") and fnmatchcase(name, f"{text[:-1]}.*")
                for text in self.listed
                for name in names
            )
        return self.known[module] or None


def fp8(raw: dict[str, Any]) -> Declared:
    """A config of `quant_method` fp8: blocks of weights with a scale each, or one scale for a module."""
    blocks = raw.get("weight_block_size")
    scales = ("weight_scale_inv",) if blocks else ("weight_scale",)
    if raw.get("activation_scheme") == "static":
        scales += ("input_scale",)
    form = Scheme(8, 0, target="weight_block_size", kind="fp8", blocks=_pair(blocks), scales=scales)
    ignored = raw.get("ignored_layers") or raw.get("modules_to_not_convert")
    # The output layer's class has no such method.
    return Declared("fp8", raw, Names(linear=form), Whole.of([*(ignored or ()), "lm_head"]))


def _pair(blocks: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in blocks) if blocks else ()


def modelopt(raw: dict[str, Any]) -> Declared:
    """ModelOpt's config, as it stands in config.json or in hf_quant_config.json."""
    raw = raw.get("quantization") if isinstance(raw.get("quantization"), dict) else raw
    ignored = Wildcards(tuple(map(str, raw.get("ignore") or raw.get("exclude_modules") or ())))
    algorithm = str(raw.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        layers = {str(name): _algorithm(said) for name, said in (raw.get("quantized_layers") or {}).items()}
        return Declared("modelopt", raw, PerLayer(layers), ignored)
    return Declared("modelopt", raw, Names(linear=_algorithm(raw)), ignored)


def _algorithm(said: dict[str, Any]) -> Scheme:
    algorithm = str(said.get("quant_algo") or "").upper()
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        group = int(said.get("group_size") or 16)
        return Scheme(4, group, target="quant_algo", kind="nvfp4", scales=("weight_scale", "weight_scale_2"))
    forms = {
        "FP8": (0, ()),
        "FP8_PER_CHANNEL_PER_TOKEN": (-1, ()),
        "FP8_PB_WO": (0, (128, 128)),
        "FP8_BLOCK_SCALES": (0, (128, 128)),
    }
    if algorithm not in forms:
        return UNREAD
    group, blocks = forms[algorithm]
    if blocks and said.get("group_size"):
        blocks = (int(said["group_size"]),) * 2
    return Scheme(8, group, target="quant_algo", kind="fp8", blocks=blocks)


@dataclass(frozen=True)
class PerLayer:
    """`quantized_layers`: a scheme for each layer that is quantized; False for all others.

    Experts may be listed one by one, as a whole, or under the layer's mlp: vLLM takes what it finds first for all.
    """

    layers: dict[str, Scheme]
    linear: Any = None

    def find(self, module: str, template: str = "") -> Any:
        """See `scheme.Listing`."""
        parent, _, leaf = module.rpartition(".")
        names = [module, f"{parent}.{_PRODUCT.get(leaf, leaf)}"]
        expert = _EXPERT.match(module)
        if expert:
            names.append(expert[1])
        for form in FORMS:
            for name in names:
                if (value := self.layers.get(form + name)) is not None:
                    return value
        return UNREAD if expert else False
