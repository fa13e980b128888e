# SPDX-License-Identifier: Apache-2.0
"""Which pipeline stages hold the vocabulary's matrices.

Of 248,320 rows of 2560 each is 1.27 GB in bf16.  The first stage embeds tokens and the
last one scores them; upstream builds both matrices on every stage of this model.
"""

from typing import TYPE_CHECKING

from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import PPMissingLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def missing_embedding(vllm_config: "VllmConfig") -> PPMissingLayer | None:
    """A place holder for ``embed_tokens``, where this stage never looks a token up; else ``None``.

    A draft model runs on the last stage and may take the target's embedding.
    """
    needed = get_pp_group().is_first_rank or vllm_config.speculative_config is not None
    return None if needed else PPMissingLayer()


def missing_head() -> PPMissingLayer | None:
    """A place holder for ``lm_head`` before the last stage; else ``None``."""
    return None if get_pp_group().is_last_rank else PPMissingLayer()
