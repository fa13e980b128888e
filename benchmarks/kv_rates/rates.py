"""One engine: for every context and number of users, how fast prompts are read and how fast all then decode."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import host_time
from benchmarks.pipeline_rates.rates import Users, turn

#: Tokens of each user before decoding counts.
SETTLE = 8
#: Different tokens of a prompt, see `Users`.
WORDS = 4


def tokens_to_ask(context: int, users: int, chunk: int, counted: int) -> int:
    """Tokens that a user asks for, so that the first is still decoding when the last has been counted.

    A user whose prompt was early gets a token with every chunk of the prompts behind it.
    """
    return SETTLE + counted + -(-users * context // chunk) + 16


def start_users(engine, context: int, users: int, tokens: int) -> tuple[Users, list[float]]:
    """Users who have their first token, and each one's seconds from asking to it, the fastest first."""
    made = Users(engine, WORDS)
    began = time.perf_counter()
    made.ask(users, context, tokens)
    made.until(lambda: made.tokens() >= 1)
    return made, sorted(round(stream.stamps[0] - began, 4) for stream in made.streams.values())


def measure(engine, contexts: list[int], users: list[int], counted: int) -> Iterator[dict]:
    """A sample for each case: tokens/s of prompts, tokens/s for each user and gaps between tokens while all decode.

    `gpu_ms` is a decode step's mean time on the GPU: with few layers the host takes longer than that, and rates say
    nothing about kernels.  The first prompt of a context is a warm-up and does not count: it compiles what prompts of that length need.

    Args:
        counted: tokens of the slowest user that decoding is measured over
    """
    chunk = engine.vllm_config.scheduler_config.max_num_batched_tokens
    for context in contexts:
        warm, _ = start_users(engine, context, 1, 2 * SETTLE)
        warm.decode(SETTLE)
        warm.leave()
        for number in users:
            made, first = start_users(engine, context, number, tokens_to_ask(context, number, chunk, counted))
            made.decode(SETTLE)
            host_time.reset(engine)
            found = turn(made, counted)
            gpu = host_time.decode_gpu_ms(host_time.collect(engine))
            made.leave()
            yield {
                "context": context,
                "users": number,
                # Every chunk of every prompt was read when the last user has a first token.
                "prompt_tokens_per_s": round(number * context / first[-1], 1),
                "gpu_ms": gpu.get("forward"),
            } | found
