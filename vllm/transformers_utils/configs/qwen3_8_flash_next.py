# SPDX-License-Identifier: Apache-2.0
"""Configurations under the names that this model had on the day of its release.

The first checkpoints and images said ``qwen3_8_flash_next``; transformers and vLLM took
the model in as ``qwen4_exp``.  Fields and tensors kept their names, so reading is all
that differs: these classes hand out transformers' own configuration objects, with
today's names in them.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen4ExpConfig, Qwen4ExpTextConfig

from vllm.ampere.checkpoint.config import present_name


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a ``config.json`` with today's names; other values are shared, not copied."""
    new = dict(config)
    if new.get("architectures"):
        new["architectures"] = [present_name(name) for name in new["architectures"]]
    if isinstance(new.get("model_type"), str):
        new["model_type"] = present_name(new["model_type"])
    for part in ("text_config", "vision_config"):
        if isinstance(new.get(part), dict):
            new[part] = renamed(new[part])
    return new


class Qwen3_8FlashNextConfig(Qwen4ExpConfig):
    """``from_dict``, which loading uses, returns a ``Qwen4ExpConfig``."""

    model_type = "qwen3_8_flash_next"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PreTrainedConfig:
        return Qwen4ExpConfig.from_dict(renamed(config_dict), **kwargs)


class Qwen3_8FlashNextTextConfig(Qwen4ExpTextConfig):
    """``from_dict``, which loading uses, returns a ``Qwen4ExpTextConfig``."""

    model_type = "qwen3_8_flash_next_text"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PreTrainedConfig:
        return Qwen4ExpTextConfig.from_dict(renamed(config_dict), **kwargs)
