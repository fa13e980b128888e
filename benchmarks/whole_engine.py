"""A small checkpoint through a whole engine on the CPU, against transformers: what the records of formats share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo import reference
from demo.reference import Reference
from tests.e2e.compare import prompt_difference
from tests.e2e.engine_run import run_engine
from tests.e2e.prompts import decisive

#: tokens of the prompts: beyond the sparse budget of 64, and within one chunk
LENGTHS, ANSWER, CHUNK = (150, 23), 12, 64

Asked = list[tuple[list[int], Reference]]


def questions(model: Any) -> Asked:
    """Prompts with transformers' greedy answers, none of which rounding decides."""
    return [decisive(model, length, ANSWER, seed=length) for length in LENGTHS]


def prompt_logprobs(model: Any, asked: Asked) -> list:
    """Of every prompt position, by transformers."""
    return [reference.prompt_logprobs(model, prompt) for prompt, _ in asked]


def compare(checkpoint: Path, stages: int, asked: Asked, wanted: list, folder: Path, **engine: Any) -> Iterator[dict]:
    """A row for each prompt: tokens that are equal, and differences of log-probabilities in nats.

    All prompts are one batch of one engine.

    Args:
        wanted: as `prompt_logprobs` gives them
        folder: for the engine's files
        engine: further arguments of `LLM`
    """
    arguments = {"pipeline_parallel_size": stages, "max_num_batched_tokens": CHUNK, "enable_prefix_caching": False}
    batch = [{"prompt": prompt, "length": ANSWER, "prompt_logprobs": True} for prompt, _ in asked]
    results = run_engine(folder, checkpoint, [batch], arguments | engine)["batches"][0]
    for result, (prompt, answer), want in zip(results, asked, wanted, strict=True):
        difference = prompt_difference(result, want)
        pairs = zip(result["logprobs"], answer.logprobs, strict=True)
        yield {
            "stages": stages,
            "prompt": len(prompt),
            "tokens": ANSWER,
            "tokens_equal": sum(a == b for a, b in zip(result["tokens"], answer.tokens, strict=True)),
            "largest_answer": max(abs(ours - theirs) for ours, theirs in pairs),
            "prompt_median": difference.median,
            "prompt_largest": difference.largest,
        }
