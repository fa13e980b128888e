# SPDX-License-Identifier: Apache-2.0
"""From a tensor's name to its module, the part of the module that it is, and the module's class.

Text-only and multimodal files, and transformers' and vLLM's own names, differ in what stands before `layers.`;
nothing below looks at it.
"""

from __future__ import annotations

import re
from functools import lru_cache

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

#: ends of tensor names that belong to a module's weight; anything else is a module of its own
SUFFIXES = frozenset(
    """
    weight weight_packed weight_scale weight_shape weight_zero_point weight_g_idx weight_scale_inv weight_scale_2
    weight_global_scale input_scale input_global_scale output_scale qweight qzeros scales g_idx bias
    """.split()
)

#: classes of modules, in the order in which they are reported
CLASSES = (
    "experts",
    "shared_experts",
    "router",
    "attention",
    "gdn",
    "hyper_connection",
    "ple",
    "norms",
    "embeddings",
    "lm_head",
    "ngram_table",
    "vision",
    "mtp",
    "other",
)
#: those that every token passes through, or may: not the n-gram table, not the optional towers
BODY = frozenset(CLASSES) - {"ngram_table", "vision", "mtp"}

_CLASS = [
    (name, re.compile(pattern))
    for name, pattern in (
        ("vision", r"^(visual|vision_tower)\."),
        ("mtp", r"^mtp\."),
        ("ngram_table", r"\.ple_embedding\.ngram_embedding(\.|$)"),
        ("norms", r"(^|[._])(norm|layernorm|norm_key|norm_query|norm_conv)$"),
        ("experts", r"\.mlp\.experts\."),
        ("shared_experts", r"\.mlp\.shared_expert(_gate)?(\.|$)"),
        ("router", r"\.mlp\.gate(\.|$)"),
        ("hyper_connection", r"(^|_|\.)hyper_connection(_mixer)?\."),
        ("ple", r"\.ple\."),
        ("gdn", r"\.linear_attn\."),
        ("attention", r"\.self_attn\."),
        ("embeddings", r"^embed_tokens$"),
        ("lm_head", r"^lm_head$"),
    )
]
_NUMBER = re.compile(r"(?<=[._])\d+(?=\.|$)")


def split(tensor: str) -> tuple[str, str]:
    """ "model.layers.3.self_attn.q_proj.weight_packed" -> ("layers.3.self_attn.q_proj", "weight_packed")."""
    name = canonical(tensor)
    module, _, suffix = name.rpartition(".")
    return (module, suffix) if suffix in SUFFIXES else (name, "")


def canonical(name: str) -> str:
    """A tensor's or module's name without what stands before `layers.`, `embed_tokens`, `lm_head`, …"""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def template(module: str) -> str:
    """A module's name with `*` for layer, expert and shard numbers."""
    return _NUMBER.sub("*", module)


@lru_cache(maxsize=4096)
def class_of(template_name: str) -> str:
    """One of CLASSES for a `template` (numbers would only make the cache miss)."""
    return next((name for name, pattern in _CLASS if pattern.search(template_name)), "other")


def layer_of(module: str) -> int | None:
    """The decoder layer of a module, counted from zero; None outside the layers (the draft module's too)."""
    match = re.match(r"layers\.(\d+)\.", module)
    return int(match[1]) if match else None
