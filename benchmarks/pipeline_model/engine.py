"""An engine core without workers: it drives a real scheduler over simulated stages.

One iteration does what upstream's `step_with_batch_queue` does: admit what arrived; schedule, if a place in the queue
of micro-batches is free, and go on as long as one is; otherwise wait for the oldest result and give it to the
scheduler.  Steps in which nothing was scheduled take a place in the queue too, as they do there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from .clock import EPOCH, Clock, simulated
from .cost import Row
from .pipeline import Pipeline, Span

#: steps without a new token, after which a scheduler counts as stuck
PATIENCE = 100_000


class Stuck(RuntimeError):
    """The scheduler has requests, and neither schedules any of them nor waits for a result."""


@dataclass
class Served:
    """One request's times in milliseconds.

    Attributes:
        arrived: when the client sent it.
        tokens: when the engine core had each of its tokens.
    """

    name: str
    arrived: float
    prompt: int
    tokens: list[float] = field(default_factory=list)


@dataclass
class Trace:
    """What happened: requests by name, every piece of work in order, steps that scheduled nothing."""

    served: dict[str, Served]
    gpu: list[Span]
    host: list[Span]
    empty_steps: int
    stages: int


class Engine:
    """Serves requests; `clock` goes on from one `serve` to the next."""

    def __init__(self, scheduler: SchedulerInterface, pipeline: Pipeline, depth: int) -> None:
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.depth = depth
        self.clock = Clock()
        self._known: dict[str, int] = {}
        self._served: dict[str, Served] = {}
        self._empty = 0

    def serve(self, requests: Iterable[Request]) -> Trace:
        """Serve all of `requests`, each at its arrival_time (in seconds as the simulated clock counts), until they end.

        Raises:
            Stuck: requests are left and none gets anything.
        """
        coming = deque(sorted(requests, key=lambda request: request.arrival_time))
        queue: deque[tuple[float, SchedulerOutput, list[str]]] = deque()
        extra = self.pipeline.overheads
        quiet = 0
        with simulated(self.clock):
            while coming or queue or self.scheduler.has_requests():
                if not queue and not self.scheduler.has_requests():
                    self.clock.reach(_arrival(coming[0]))
                while coming and _arrival(coming[0]) <= self.clock.now_ms:
                    self._admit(coming.popleft())
                if self.scheduler.has_requests():
                    self.clock.advance(extra.schedule_ms)
                    output = self.scheduler.schedule(False)
                    ready, sampling = self._dispatch(output)
                    queue.append((ready, output, sampling))
                    if len(queue) < self.depth and self.scheduler.has_requests():
                        continue
                ready, output, sampling = queue.popleft()
                self.clock.reach(ready)
                self.clock.advance(extra.update_ms)
                quiet = 0 if output.num_scheduled_tokens else quiet + 1
                self._update(output, sampling)
                if quiet > self.depth and coming:
                    self.clock.reach(_arrival(coming[0]))
                elif quiet > PATIENCE:
                    raise Stuck(f"{quiet} steps in a row scheduled nothing while requests wait")
        done = self.pipeline
        return Trace(self._served, list(done.gpu), list(done.host), self._empty, done.cost.stages)

    def forget(self) -> None:
        """Drop what was recorded so far; caches and clock stay."""
        self._served, self._empty = {}, 0
        self.pipeline.gpu.clear()
        self.pipeline.host.clear()

    def _admit(self, request: Request) -> None:
        self._known[request.request_id] = request.num_prompt_tokens
        self._served[request.request_id] = Served(request.request_id, _arrival(request), request.num_prompt_tokens)
        self.scheduler.add_request(request)

    def _dispatch(self, output: SchedulerOutput) -> tuple[float, list[str]]:
        rows: dict[str, Row] = {}
        sampling: list[str] = []
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens)) | {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs
        }
        for name, tokens in output.num_scheduled_tokens.items():
            rows[name] = Row(tokens, before[name] + tokens)
            if rows[name].context >= self._known[name]:
                sampling.append(name)
                self._known[name] += 1
        self._empty += not rows
        return self.pipeline.dispatch(self.clock.now_ms, rows, sampling), sampling

    def _update(self, output: SchedulerOutput, sampling: list[str]) -> None:
        names = list(output.num_scheduled_tokens)
        results = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[0] if name in sampling else [] for name in names],
            ),
        )
        for client in results.values():
            for one in client.outputs:
                self._served[one.request_id].tokens += [self.clock.now_ms] * len(one.new_token_ids)


def _arrival(request: Request) -> float:
    """Milliseconds of simulated time, to a nanosecond: seconds since EPOCH leave rounding errors behind."""
    return math.floor((request.arrival_time - EPOCH) * 1e9 + 0.5) / 1e6
