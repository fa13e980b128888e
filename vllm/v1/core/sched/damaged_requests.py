# SPDX-License-Identifier: Apache-2.0
"""A request whose logits hold a NaN or an infinity ends with an error.

Its hidden states, K/V and recurrent state are damaged and stay so; whatever would be sampled from here on is noise,
commonly the same token for ever. Other requests share nothing with it but blocks of a common prefix. Those may be
where the damage lies, so none of its blocks is found by a later request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics import ngram_table

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.metrics.stats import IterationStats

logger = init_logger(__name__)

CODE = "damaged_logits"
MESSAGE = (
    "The model's output for this request is not a number (NaN or infinity in its logits), so it was ended. Tokens that "
    "were sent before are whole. The server's log names the request."
)


def with_damaged(
    errors: dict[str, RequestError], scheduler: Scheduler, num_damaged: Mapping[str, int] | None
) -> dict[str, RequestError]:
    """`errors`, by request, and those of requests that this step's logits end.

    Args:
        errors: of requests that end for other reasons
        scheduler: their blocks leave its prefix cache; it ends the requests itself
        num_damaged: damaged logits by request; None where nobody counted
    """
    if not num_damaged or not any(num_damaged.values()):
        return errors
    found = dict(errors)
    for request_id, count in num_damaged.items():
        request = scheduler.requests.get(request_id)
        if not count or request is None or request.is_finished():
            continue
        # All groups: which of a request's states is damaged is not known here.
        blocks = scheduler.kv_cache_manager.get_block_ids(request_id)
        scheduler.kv_cache_manager.evict_blocks({block for group in blocks for block in group})
        why = ngram_table.reason(request_id)
        if why is not None:
            found[request_id] = RequestError(
                CODE, f"{why} So the request was ended. Tokens that were sent before are whole."
            )
            logger.error("Request %s ends: %s", request_id, why)
            continue
        logger.error(
            "Request %s ends: %d of its logits are NaN or infinity, after %d tokens of prompt and %d of answer. If it "
            "comes again, look at the checkpoint (`vllm ampere check`), then at the memory of the GPUs.",
            request_id,
            count,
            request.num_prompt_tokens,
            request.num_output_tokens,
        )
        found[request_id] = RequestError(CODE, MESSAGE)
    return found


def count_damaged(
    processor: OutputProcessor,
    state: RequestState,
    output: EngineCoreOutput,
    timestamp: float | None,
    stats: IterationStats | None,
) -> None:
    """Count an ended request in `vllm:corrupted_requests` and among those that finished with an error.

    The processor counts requests that were refused on arrival nowhere, and takes those with an error for such.
    """
    if output.error is None or output.error.code != CODE or stats is None or state.stats is None:
        return
    state.stats.is_corrupted = True
    processor._update_stats_from_output(state, output, timestamp, stats)
    processor._update_stats_from_finished(state, FinishReason.ERROR, stats)
