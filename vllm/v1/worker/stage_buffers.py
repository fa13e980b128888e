# SPDX-License-Identifier: Apache-2.0
"""The memory profile holds what a pipeline stage receives and what it still sends.

The profile runs a stage alone, on activations of its own. A step that serves has two tensors more: the activations that
came from the stage before, which the worker keeps until its forward has ended (the forward reads a copy of fixed
address), and those of the step before, which the process group keeps until the next ones are sent. Both are
[tokens, 10240] in bf16: 40 MiB each for a chunk of 2048 tokens. A stage in the middle lacks both of them in its
profile, 80 MiB of the 400 MB that 24 GB cards may have left for K/V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors


def profile_stage(runner: Any, **arguments: Any) -> None:
    """`runner.profile_run(**arguments)` beside the buffers of a step that serves.

    Args:
        runner: a model runner whose model is loaded
        arguments: of its profile_run
    """
    held = stage_buffers(runner)
    runner.profile_run(**arguments)
    held.clear()


def stage_buffers(runner: Any) -> list[IntermediateTensors]:
    """What the stage receives, and what it sends: none, one or both, each for the largest step."""
    group = get_pp_group()
    # A stage sends what the next one receives, which has the same tensors in this model and most others.
    return [
        runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
        for at_the_end in (group.is_first_rank, group.is_last_rank)
        if not at_the_end
    ]
