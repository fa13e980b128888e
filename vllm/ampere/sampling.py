# SPDX-License-Identifier: Apache-2.0
"""Whether a generation config says how to sample. Kept free of imports: the engine's warning uses it as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: what upstream takes from a generation config; with none of them it samples at temperature 1 from all tokens
SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
    "skip_special_tokens",
)

EXAMPLE = """"temperature": 0.7, "top_p": 0.8, "top_k": 20"""
"""Values as they may stand in a generation config; a model's card has its own."""


def sets_sampling(generation_config: Mapping[str, Any] | None) -> bool:
    """False where a request that sets nothing would be sampled from the whole vocabulary at temperature 1."""
    return generation_config is not None and any(key in generation_config for key in SAMPLING_KEYS)
