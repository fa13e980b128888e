"""One engine: for every context and number of users, how fast prompts are read and how fast all then decode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

from benchmarks import host_time
from benchmarks.pipeline_rates.rates import Users, turn
from benchmarks.side_by_side import SETTLE, tokens_to_ask

#: Different tokens of a prompt, see `Users`.
WORDS = 4


def start_users(engine, context: int, users: int, tokens: int) -> tuple[Users, list[float]]:
    """Users who have their first token, and each one's seconds from asking to it, the fastest first."""
    made = Users(engine, WORDS)
    began = time.perf_counter()
    made.ask(users, context, tokens)
    made.until(lambda: made.tokens() >= 1)
    return made, sorted(round(stream.stamps[0] - began, 4) for stream in made.streams.values())


def warm_up(engine, context: int) -> None:
    """Compile what prompts of that length need, and decoding after them."""
    warm, _ = start_users(engine, context, 1, 2 * SETTLE)
    warm.decode(SETTLE)
    warm.leave()


def case(engine, context: int, users: int, counted: int, meanwhile=nullcontext) -> tuple[list[float], dict]:
    """Seconds to each user's first token, and what decoding gave: `turn`'s figures, and `gpu_ms`.

    `gpu_ms` is a decode step's mean time on the GPU: with few layers the host takes longer than that, and rates say
    nothing about kernels.

    Args:
        counted: tokens of the slowest user that decoding is measured over
        meanwhile: makes a context in which that is done
    """
    chunk = engine.vllm_config.scheduler_config.max_num_batched_tokens
    made, first = start_users(engine, context, users, tokens_to_ask(context, users, chunk, counted))
    made.decode(SETTLE)
    host_time.reset(engine)
    with meanwhile():
        found = turn(made, counted)
    gpu = host_time.decode_gpu_ms(host_time.collect(engine))
    made.leave()
    return first, {"gpu_ms": gpu.get("forward")} | found


def measure(engine, contexts: list[int], users: list[int], counted: int) -> Iterator[dict]:
    """A sample for each case: tokens/s of prompts, tokens/s for each user and gaps between tokens while all decode."""
    for context in contexts:
        warm_up(engine, context)
        for number in users:
            first, found = case(engine, context, number, counted)
            yield {
                "context": context,
                "users": number,
                # Every chunk of every prompt was read when the last user has a first token.
                "prompt_tokens_per_s": round(number * context / first[-1], 1),
            } | found
