# SPDX-License-Identifier: Apache-2.0
"""The JSON files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.ampere.checkpoint.errors import BrokenJson, FileUnreadable

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
#: NVIDIA's exporter keeps the quantization config in a file of its own
MODELOPT_CONFIG = "hf_quant_config.json"


def load(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no such file.

    Raises:
        FileUnreadable, BrokenJson
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        # A dangling link is a file that should be there.
        if path.is_symlink():
            raise FileUnreadable(path.name, "a readable file", "a link to nothing") from None
        return None
    except OSError as error:
        raise FileUnreadable(path.name, "a readable file", error.strerror) from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BrokenJson(path.name, "JSON", error) from error
    if not isinstance(document, dict):
        raise BrokenJson(path.name, "a JSON object", type(document).__name__)
    return document


def weight_map(index: dict[str, Any] | None) -> dict[str, str] | None:
    """Tensor to file name, from a loaded index; None without one. Raises BrokenJson."""
    if index is None:
        return None
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise BrokenJson(INDEX, "a weight_map of tensor names to file names", type(names).__name__)
    return names
