# SPDX-License-Identifier: Apache-2.0
"""One recommended --kv-cache-memory for all pipeline stages.

Each stage works out what it could give to the KV cache and prints it, but the option is one number for every stage.
Stages differ: the first holds embeddings, the last the output projection, one the buffers of the n-gram layer, and
partitions are uneven. Whoever takes the line of a stage with room to spare runs another one out of memory.
"""

from __future__ import annotations

import torch

from vllm import envs
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

logger = init_logger(__name__)


def smallest_on_all_stages(to_gpu_limit: int, to_requested_limit: int) -> tuple[int, int]:
    """What every stage can give, in bytes, from what this one can. Called on all stages alike.

    With VLLM_ENABLE_STARTUP_PLAN the values stay as they are: a stage stores its own for its next start, and one
    whose stored plan applies does not come here, so that the others would wait for it.
    """
    group = get_pp_group()
    if group.world_size == 1 or envs.VLLM_ENABLE_STARTUP_PLAN:
        return to_gpu_limit, to_requested_limit
    stages: list[tuple[int, int]] = [(0, 0)] * group.world_size
    torch.distributed.all_gather_object(stages, (to_gpu_limit, to_requested_limit), group=group.cpu_group)
    to_gpu_limits, to_requested_limits = zip(*stages)
    if group.is_first_rank:
        logger.info(
            "--kv-cache-memory is one value for all stages, so what is recommended is what stage %d can give; by stage, "
            "within requested memory: %s GiB.",
            to_requested_limits.index(min(to_requested_limits)),
            ", ".join(format_gib(limit) for limit in to_requested_limits),
        )
    return min(to_gpu_limits), min(to_requested_limits)
