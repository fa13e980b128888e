# SPDX-License-Identifier: Apache-2.0
"""A warning where a model brings no sampling parameters of its own.

Some exporters write a generation_config.json that holds only token ids. Upstream then samples requests that set
nothing themselves from the whole vocabulary at temperature 1, and says nothing: with a quantized model that shows as
odd words and broken tool calls, which are taken for a fault of the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.ampere.sampling import EXAMPLE
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

OPTION = f"--override-generation-config '{{{EXAMPLE}}}'"


def warn_of_neutral_sampling(model_config: ModelConfig) -> None:
    """Called where no sampling parameter was found. Silent if the user asked for vLLM's own defaults."""
    source = model_config.generation_config
    if source == "vllm":
        return
    logger.warning_once(
        "The generation config of %s sets no sampling parameters: requests that set none are sampled from the whole "
        "vocabulary at temperature 1. Give the values of the model's card, as in %s, or accept this with "
        "--generation-config vllm.",
        model_config.model if source == "auto" else source,
        OPTION,
    )
