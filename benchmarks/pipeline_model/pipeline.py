"""The stages: when each one's host thread and GPU work on a micro-batch.

Stages take micro-batches in the order of their dispatch, so that all times of one follow from those before it and can
be computed as it is dispatched.  What a stage waits for:

- its host thread: the scheduler's message, its own work on the micro-batch before, and the announcement of tensor
  shapes, which the stage before sends once its own launches are done (a blocking receive in the worker);
- its GPU: its launches, the micro-batch before, the activations, and on the first stage the tokens that the last one
  sampled for the same requests.

Host threads may therefore run ahead of the GPUs, as far as the engine core schedules ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import model
from .cost import Row, StageCost


@dataclass(frozen=True)
class Overheads:
    """What is neither a GPU's work nor waiting; milliseconds.

    Attributes:
        host_ms: a worker's host time for a micro-batch: receive, prepare, launch, sample.
        empty_ms: the same for a step in which nothing was scheduled.
        schedule_ms: engine core: schedule one step and send it to the workers.
        update_ms: engine core: take in one step's tokens.
        hop_ms: latency of handing activations to the next stage, and of tokens to the first.
        link_gbs: rate of that link in GB/s; a token is 20 KiB.
        return_ms: from the last stage's GPU to the engine core.
    """

    host_ms: float = 0.0
    empty_ms: float = 0.0
    schedule_ms: float = 0.0
    update_ms: float = 0.0
    hop_ms: float = 0.0
    link_gbs: float = float("inf")
    return_ms: float = 0.0


@dataclass(frozen=True)
class Span:
    """One stage at work on one micro-batch, [begin, end) in milliseconds; `prefill_tokens` of it are of chunks."""

    stage: int
    begin: float
    end: float
    requests: tuple[str, ...]
    prefill_tokens: int


@dataclass
class Pipeline:
    """State of all stages.

    Attributes:
        asynchronous: False makes the last stage's host thread wait for its tokens before it goes on.
        gpu: what every GPU did, in order of dispatch; `host` the same for the host threads.
    """

    cost: StageCost
    overheads: Overheads
    asynchronous: bool
    gpu: list[Span] = field(default_factory=list)
    host: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._host_free = [0.0] * self.cost.stages
        self._gpu_free = [0.0] * self.cost.stages
        self._token_at: dict[str, float] = {}
        self._last_ready = 0.0

    def dispatch(self, now: float, rows: dict[str, Row], sampling: Sequence[str]) -> float:
        """Send a micro-batch that was scheduled at `now` through all stages.

        Args:
            rows: by request; empty for a step in which nothing was scheduled.
            sampling: requests that get a token from it.

        Returns: when the engine core has its result.
        """
        self._last_ready = max(self._last_ready, self._forward(now, rows, sampling) if rows else self._empty(now))
        return self._last_ready

    def _empty(self, now: float) -> float:
        for stage in range(self.cost.stages):
            self._host_free[stage] = max(now, self._host_free[stage]) + self.overheads.empty_ms
        return self._host_free[-1] + self.overheads.return_ms

    def _forward(self, now: float, rows: dict[str, Row], sampling: Sequence[str]) -> float:
        extra, names = self.overheads, tuple(rows)
        transfer = (
            extra.hop_ms + sum(row.tokens for row in rows.values()) * model.ACTIVATION_BYTES / extra.link_gbs / 1e6
        )
        chunk = sum(row.tokens for row in rows.values() if row.tokens > 1)
        announced = now
        arrived = max((self._token_at.get(name, 0.0) for name in rows), default=0.0)
        for stage in range(self.cost.stages):
            begin = max(announced, self._host_free[stage])
            announced = self._host_free[stage] = begin + extra.host_ms
            self.host.append(Span(stage, begin, announced, names, chunk))
            begin = max(announced, arrived, self._gpu_free[stage])
            end = self._gpu_free[stage] = begin + self.cost.gpu_ms(stage, list(rows.values()))
            self.gpu.append(Span(stage, begin, end, names, chunk))
            arrived = end + transfer
        if not self.asynchronous:
            self._host_free[-1] = max(self._host_free[-1], end)
        for name in sampling:
            self._token_at[name] = end + extra.hop_ms
        return end + extra.return_ms
