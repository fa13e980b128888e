# SPDX-License-Identifier: Apache-2.0
"""Steps that say nothing stay in the engine core: the stages are told with the next one how many there were.

With a pipeline, the engine core goes on scheduling while micro-batches are on their way, and mostly finds nothing to
do.  Each such empty step takes a place in its queue and a number, and both mean something: a request decodes again a
fixed number of steps later, and the stages pass on its token by counting them.  What they need not be is a message that
every stage takes in and the last one answers (0.15 to 0.3 ms of host time on each, one for every stage and token with
a single user), nor a millisecond of sleep in the engine core, which upstream grants threads that move K/V caches.

So an empty step is answered here, in its place in the queue, and counted.  The next message carries the count, and a
stage then does first what it would have done in each: take in the tokens whose turn it was.  Nothing happens on a stage
between two messages, so that it does the same in the same order, only later.

`--additional-config '{"quiet_steps": false}'` sends every step as upstream does.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import fields
from typing import Any

from vllm.config.switches import switch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

#: What even a step without requests may hold, about drafts and cascade attention of the requests it has not.
ABOUT_REQUESTS = {"num_common_prefix_blocks", "num_spec_tokens_to_schedule", "skip_drafts"}
#: Everything else must be absent, whatever upstream may add.
MUST_BE_ABSENT = [
    field.name for field in fields(SchedulerOutput) if field.name not in ABOUT_REQUESTS | {"scheduled_cached_reqs"}
]


def says_nothing(output: SchedulerOutput) -> bool:
    """Whether a stage would learn nothing from this step but that it is one."""
    if output.total_num_scheduled_tokens or output.scheduled_cached_reqs.req_ids:
        return False
    return not any(getattr(output, name) for name in MUST_BE_ABSENT)


class QuietSteps:
    """The engine core's side.

    Args:
        vllm_config: of the engine
    """

    def __init__(self, vllm_config: Any) -> None:
        self.stages = vllm_config.parallel_config.pipeline_parallel_size
        self.on = (
            switch(vllm_config.additional_config, "quiet_steps")
            # The older runner counts no steps, and is left alone.
            and vllm_config.use_v2_model_runner
            # Connectors move K/V and encoder outputs in empty steps, and get the time in the pauses.
            and vllm_config.kv_transfer_config is None
            and vllm_config.ec_transfer_config is None
            # Ranks of data parallelism step together.
            and vllm_config.parallel_config.data_parallel_size == 1
        )
        self.kept_back = 0
        self._sent = self._answered = 0

    def execute(self, executor: Any, output: SchedulerOutput) -> Future:
        """In place of the executor's `execute_model(output, non_block=True)`."""
        if self.on and says_nothing(output):
            # After as many as there are stages, nothing is left to take in.
            self.kept_back = min(self.kept_back + 1, self.stages)
            answer: Future = Future()
            answer.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return answer
        if self.kept_back:
            output.quiet_steps = self.kept_back  # type: ignore[attr-defined]
            self.kept_back = 0
        self._sent += output.total_num_scheduled_tokens > 0
        return executor.execute_model(output, non_block=True)

    def busy(self, batch_queue: Any) -> bool:
        """Whether the engine core must not sleep after a turn that scheduled nothing.

        While a micro-batch is computed, a next turn waits for it anyway.  And when one has been answered since this was
        last asked, the next turn may have something to schedule, which without asynchronous scheduling is the rule.
        """
        computing = sum(output.total_num_scheduled_tokens > 0 for _, output, _ in batch_queue or ())
        before, self._answered = self._answered, self._sent - computing
        return self.on and (computing > 0 or self._answered > before)


def catch_up(runner: Any, output: SchedulerOutput) -> None:
    """In place of a model runner's `update_pp_decode_requests()`: the stage's side."""
    for _ in range(getattr(output, "quiet_steps", 0) + 1):
        runner.update_pp_decode_requests()
