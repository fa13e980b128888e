# SPDX-License-Identifier: Apache-2.0
"""The quantization config of a checkpoint, in the names that the draft model builds with.

The checkpoint counts the draft module's layers from zero (``mtp.layers.0``), the engine
behind the model's own (``mtp.layers.48``), so that caches have one name each.  Upstream
renames lists that other methods have; compressed-tensors keeps its names as targets and
an ignore list, and gptqmodel's are the modules that the files hold packed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import get_draft_quant_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# In a plain name, or in a regular expression with its dots escaped.
_LAYER = re.compile(r"(\bmtp\\?\.layers\\?\.)(\d+)")
# The text model of a multimodal release; the draft model has only that.
_TEXT = re.compile(r"^model\.language_model\.")
_LISTS = ("ignore", "modules_in_block_to_quantize", "modules_to_not_convert")
_MAPS = ("target_scheme_map", "dynamic")


def rename_draft_modules(quant_config: Any, first_layer: int) -> None:
    """Rename the modules in ``quant_config`` in place.

    Args:
        quant_config: the draft model's own, or None.
        first_layer: the engine's number of the first draft layer.

    """

    def renamed(name: str) -> str:
        name = _LAYER.sub(lambda found: f"{found[1]}{first_layer + int(found[2])}", name)
        return _TEXT.sub("model.", name)

    for attribute in _LISTS:
        if names := getattr(quant_config, attribute, None):
            setattr(quant_config, attribute, [renamed(name) for name in names])
    for attribute in _MAPS:
        if by_name := getattr(quant_config, attribute, None):
            setattr(quant_config, attribute, {renamed(name): value for name, value in by_name.items()})


def draft_vocabulary_config(vllm_config: VllmConfig) -> Any:
    """The config by which the draft model's embedding and head are built; None without one.

    They are the model's own tensors, under ``model.embed_tokens`` and ``lm_head``.
    """
    quant_config = get_draft_quant_config(vllm_config)
    rename_draft_modules(quant_config, 0)
    return quant_config
