# SPDX-License-Identifier: Apache-2.0
"""Where a layer's table is, by the engine's configuration."""

import os
import re
from typing import TYPE_CHECKING, Any

from .locate import TableShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_READERS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")


def reads_safetensors(vllm_config: "VllmConfig") -> bool:
    """Whether weights are loaded from the model directory's own safetensors files, where there are any."""
    return vllm_config.load_config.load_format in _READERS


def layer_name(prefix: str) -> str:
    """The part of a layer's name that is the same in every checkpoint.

    ``language_model.model.layers.1.ple…`` here is ``model.language_model.layers.1.ple…`` there.
    """
    layer = re.search(r"layers\.\d+\..+$", prefix)
    return layer[0] if layer else prefix


def table_shape(text_config: Any, rows: int, dim: int) -> TableShape:
    """What the config implies for a table of ``rows`` x ``dim``; 512 parts are upstream's default."""
    return TableShape(rows=rows, dim=dim, parts=int(getattr(text_config, "split_ngram_parts", 512)))


def model_folder(vllm_config: "VllmConfig") -> str:
    """The directory with the model's safetensors files.

    A hub id is fetched by the loader's own rules, with its revision, cache directory
    and ignore patterns; fetching again later costs the loader nothing.
    """
    model = vllm_config.model_config.model
    if os.path.isdir(model) or vllm_config.load_config.load_format == "dummy":
        return model
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(vllm_config.load_config)
    folder, *_ = loader._prepare_weights(
        model,
        subfolder=None,
        revision=vllm_config.model_config.revision,
        fall_back_to_pt=False,
        allow_patterns_overrides=None,
    )
    return folder
