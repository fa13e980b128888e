"""Who asks what and when: the situations that policies are compared in."""

from __future__ import annotations

import random

from .clock import EPOCH
from .configs import BLOCK, Requests, Serving, build_scheduler
from .cost import StageCost
from .engine import Engine, Trace
from .pipeline import Overheads, Pipeline


def engine_for(serving: Serving, cost: StageCost, overheads: Overheads) -> Engine:
    if cost.stages != serving.stages:
        raise ValueError(
            f"stage times are given for {cost.stages} stages, the scheduler is set up for {serving.stages}"
        )
    return Engine(build_scheduler(serving), Pipeline(cost, overheads, serving.asynchronous), serving.depth)


def decoding(
    serving: Serving,
    cost: StageCost,
    overheads: Overheads,
    users: int,
    context: int = 250_000,
    tail: int | None = None,
    arrivals_ms: tuple[float, float] = (0.0, 0.0),
    output: int = 128,
    seed: int = 0,
) -> Trace:
    """`users` send cached prompts again and all decode: the second round of a benchmark.

    Args:
        context: tokens of each prompt.
        tail: how many of them are not in the cache; None leaves what is beyond the last full block. With one step's
            budget over, all prompts are finished in one step, and all users are in one micro-batch from then on.
        arrivals_ms: the range that arrivals are drawn from.
        output: tokens for each.
    """
    length = context if tail is None else (context - 1) // BLOCK * BLOCK + tail
    engine = engine_for(serving, cost, overheads)
    make, draw = Requests(), random.Random(seed)
    for user in range(users):
        engine.serve([make.make(f"warm-{user}", user, length, 1, _now(engine))])
    engine.forget()
    start = _now(engine)
    return engine.serve(
        make.make(f"user-{user}", user, length, output, start + draw.uniform(*arrivals_ms) / 1e3)
        for user in range(users)
    )


def prompts(
    serving: Serving,
    cost: StageCost,
    overheads: Overheads,
    lengths: list[int],
    arrivals_ms: list[float],
    outputs: list[int] | None = None,
) -> Trace:
    """Uncached prompts of `lengths`, each at its time; user k asks the k-th and gets so many tokens, one if not said."""
    engine, make = engine_for(serving, cost, overheads), Requests()
    return engine.serve(
        make.make(f"user-{user}", user, length, output, EPOCH + at / 1e3)
        for user, (length, at, output) in enumerate(
            zip(lengths, arrivals_ms, outputs or [1] * len(lengths), strict=True)
        )
    )


def _now(engine: Engine) -> float:
    return engine.clock.seconds()
