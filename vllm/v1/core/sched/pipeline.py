# SPDX-License-Identifier: Apache-2.0
"""The scheduler for pipelines: `--scheduler-cls vllm.v1.core.sched.pipeline.PipelineScheduler`.

Upstream's scheduler with two decisions made before it fills a micro-batch: which of the requests that could decode
stay behind for the next ones (decode_spread.py, decode_batches.py), and how many tokens each prompt may take of what decoding leaves
(prefill_shares.py).  Admission, blocks, preemption, priorities, speculation and caches remain upstream's.

Both decisions reach upstream's loop through what it asks for each request anyway.  `next_decode_eligible_step`, which
spaces the decodes of one request under asynchronous scheduling, keeps a request out of one step; the two methods that
trim a chunk of a prompt (`_mamba_block_aligned_split`, `_reserve_prefill_lookahead`) trim it to its share.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched import pipeline_options
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.decode_batches import FixedBatches, MeasuredBatches
from vllm.v1.core.sched.decode_spread import DecodeSpread
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.pipeline_options import MEASURED
from vllm.v1.core.sched.prefill_shares import Prefill, divide
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

#: Requests in the queue that are looked at for a micro-batch.  Those behind are admitted by upstream's order.
LOOK_AHEAD = 64


class PipelineScheduler(Scheduler):
    """Spreads decoding over the micro-batches of a pipeline and shares their room between prompts.

    Building it gives the asynchronous flavour where the configuration asks for asynchronous scheduling, so that one
    name serves both.
    """

    def __new__(cls, vllm_config: VllmConfig, *args, **kwargs) -> PipelineScheduler:
        if cls is PipelineScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = AsyncPipelineScheduler
        return super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.options = pipeline_options.parse(vllm_config.additional_config)
        self.spread = self._spread(self.parallel_config.pipeline_parallel_size)
        #: Tokens of a prompt that this micro-batch may take, by request id; without an entry, as many as fit.
        self._shares: dict[str, int] = {}
        #: Tokens of shares that could not be used, because a chunk has to end where a state is kept.
        self._spare = 0
        #: Steps for which nothing is set aside for the queue, because its first request found no blocks.
        self._queue_stuck = 0

    def _spread(self, stages: int) -> DecodeSpread:
        min_batch = self.options.min_decode_batch
        if min_batch is None:
            # Stages that share cores have nothing to gain, and a trial would cost rate (pipeline-cpu-scheduler.json).
            min_batch = self.max_num_running_reqs if current_platform.is_cpu() else MEASURED
        batches = MeasuredBatches(stages) if min_batch == MEASURED else FixedBatches(stages, min_batch)
        return DecodeSpread(stages, batches)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        reserved = self._choose_decodes()
        queued = self._share_prefill(reserved)
        running = len(self.running)
        output = super().schedule(throttle_prefills)
        self._shares = {}
        # Tokens set aside for a request that finds no blocks stop the very one whose end would free some, so wait a round.
        admitted = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        if queued and not admitted and len(self.running) >= running:
            self._queue_stuck = self.spread.stages
        elif self._queue_stuck:
            self._queue_stuck -= 1
        self.spread.sent([name for name in output.num_scheduled_tokens if not self.requests[name].is_prefill_chunk])
        self.spread.forget(output.finished_req_ids)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        chunks = any(tokens > 1 + len(drafts.get(name, ())) for name, tokens in scheduled.items())
        self.spread.batches.returned(len(scheduled), quiet=not chunks)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _choose_decodes(self) -> list[int]:
        """Keep back what exceeds this micro-batch's part; the tokens that each of the others will take."""
        decoding = {request.request_id for request in self.running if not request.is_prefill_chunk}
        ready = [request for request in self.running if request.request_id in decoding and self._can_decode(request)]
        quota = self.spread.quota(decoding, len(decoding))
        if len(ready) > quota:
            # Whoever has waited longest goes first; sorting is stable, so among equals the oldest.
            ready.sort(key=lambda request: (self._priority(request), self.spread.last(request.request_id)))
            for request in ready[quota:]:
                # `schedule` counts itself in first: not in step current_step + 1, which is this one.
                request.next_decode_eligible_step = self.current_step + 2
        return [_uncomputed(request) for request in ready[:quota]]

    def _can_decode(self, request: Request) -> bool:
        if self.current_step + 1 < request.next_decode_eligible_step:
            return False
        if request.num_output_placeholders:
            # A token is on its way. Drafts may all be rejected, so each step in flight is sure of one token only.
            sure = request.num_computed_tokens - request.num_output_placeholders + 2
            if sure >= request.num_prompt_tokens + request.max_tokens:
                return False
        room = self.max_model_len - request.num_computed_tokens - self.num_sampled_tokens_per_step
        return min(_uncomputed(request), room) > 0

    def _share_prefill(self, decodes: list[int]) -> bool:
        """Set `_shares` for this micro-batch; whether tokens were set aside for requests of the queue."""
        running = [request for request in self.running if request.is_prefill_chunk and _uncomputed(request) > 0]
        queue = [] if self._queue_stuck and running else self._queue()
        if not running and not queue:
            return False
        prefills = [self._prefill(request) for request in running]
        prefills += [self._prefill(request, self._cached(request), needs_seat=True) for request in queue]
        arrival = {request.request_id: request.arrival_time for request in chain(running, queue)}
        prefills.sort(key=lambda prefill: (prefill.priority, arrival[prefill.request_id]))

        spec = self.vllm_config.speculative_config
        # Positions of the input batch that every request takes beside its tokens, for drafts.
        slots = spec.max_num_new_slots_for_drafting if spec is not None else 0
        budget = min(
            self.max_num_scheduled_tokens - sum(decodes),
            self.scheduler_config.max_num_batched_tokens - sum(decodes) - slots * (len(decodes) + len(prefills)),
        )
        seats = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        shares = divide(prefills, max(budget, 0), seats, self.options.long_prefill_share, self._chunk_limit())
        # All that is left needs no limit, and must not have one: upstream may pad the last token with drafts.
        self._shares = {
            prefill.request_id: shares[prefill.request_id]
            for prefill in prefills
            if shares[prefill.request_id] < prefill.left
        }
        self._spare = 0
        return any(shares[request.request_id] for request in queue)

    def _chunk_limit(self) -> int:
        """Upstream's `long_prefill_token_threshold`, which it applies to each chunk where there is another request."""
        config = self.scheduler_config
        requests = sum(self.get_request_counts())
        if not config.long_prefill_token_threshold or requests <= 1:
            return self.max_num_scheduled_tokens
        fair = config.max_num_batched_tokens // requests if self.adaptive_long_prefill_threshold else 0
        return max(config.long_prefill_token_threshold, fair)

    def _queue(self) -> list[Request]:
        """Requests that could start now, in the order in which upstream would take them."""
        open_queues = [self.kv_holding_waiting]
        if self._pause_state == PauseState.UNPAUSED:
            open_queues.append(self.waiting)
        return [
            request
            for request in islice(chain.from_iterable(open_queues), LOOK_AHEAD)
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            # A preempted request may not start while a token of it is on its way.
            and (request.drop_stale_output or not request.num_stale_output_tokens)
        ]

    def _cached(self, request: Request) -> int:
        """Tokens of a request in the queue that need no computing: a long chat whose past is cached is short work."""
        return request.num_computed_tokens or self.kv_cache_manager.get_computed_blocks(request)[1]

    def _prefill(self, request: Request, computed: int | None = None, needs_seat: bool = False) -> Prefill:
        computed = request.num_computed_tokens if computed is None else computed
        left = max(request.num_tokens - computed, 1)
        return Prefill(request.request_id, left, needs_seat, self._priority(request))

    def _priority(self, request: Request) -> int:
        return request.priority if self.policy == SchedulingPolicy.PRIORITY else 0

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *args, **kwargs) -> int:
        # No room at all is left to the next method: in the queue, 0 from this one would also stop those behind.
        num_new_tokens = min(num_new_tokens, self._room(request) or num_new_tokens)
        split = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        if split or not num_new_tokens:
            return split
        # Too little room for a whole block. Upstream then waits for a step with more, and with users that decode in
        # every step none comes. A chunk inside a block is what it computes where blocks exceed the chunk limit, so
        # say that they do.
        threshold = self.scheduler_config.long_prefill_token_threshold
        self.scheduler_config.long_prefill_token_threshold = 1
        try:
            return super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        finally:
            self.scheduler_config.long_prefill_token_threshold = threshold

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        share = self._shares.get(request.request_id)
        if share is None:
            return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        num_new_tokens = min(num_new_tokens, self._room(request))
        taken = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        self._spare += share - taken
        return taken

    def _room(self, request: Request) -> int:
        """Tokens that the request may take in this micro-batch."""
        share = self._shares.get(request.request_id)
        return self.max_num_scheduled_tokens if share is None else share + self._spare


class AsyncPipelineScheduler(PipelineScheduler, AsyncScheduler):
    """The same over upstream's asynchronous scheduler, which schedules a token before the one before it is known."""


def _uncomputed(request: Request) -> int:
    """Tokens known, drafted or on their way that no step has been given yet."""
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
