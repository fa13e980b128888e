"""What one stage answers to a prompt alone, under several cuts of the prompt.

The recurrent layers compute 64 tokens at a time, counted from where a chunk of the prompt begins.  A chunk that ends
elsewhere rounds otherwise from there on, and what rounding moves, the sparse layers' choice of rows makes larger.  Under
load the scheduler cuts wherever there is room, so an answer is decided only as far as cuts alone leave it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

#: Tokens of a chunk at most.  The first is what a prompt alone gets, the others end inside of 64 tokens.
WHOLE, CUTS = 512, (300, 97, 23)


def engine(model: str, **arguments):
    """An engine whose core is in this process, so that its step can be given another size; nothing is cached."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(model, enforce_eager=True, enable_prefix_caching=False, **arguments).llm_engine


def answer(llm, job: dict, size_at: Callable[[int], int]) -> dict:
    """Greedy tokens for `job`, and by how many nats each was ahead of the next best.

    Args:
        llm: of `engine`, idle
        job: `prompt` (token ids) and `length` (tokens to answer)
        size_at: tokens that a step may compute, at most WHOLE, from how many lie behind it
    """
    from vllm import SamplingParams

    scheduler = llm.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0, max_tokens=job["length"], ignore_eos=True, detokenize=False, logprobs=2)
    llm.add_request("alone", {"prompt_token_ids": job["prompt"]}, params)
    final = None
    while llm.has_unfinished_requests():
        done = next((request.num_computed_tokens for request in scheduler.requests.values()), 0)
        scheduler.max_num_scheduled_tokens = size_at(done)
        final = next(iter(llm.step()), final)
    gaps = []
    for choices in final.outputs[0].logprobs:
        best = sorted((choice.logprob for choice in choices.values()), reverse=True)
        gaps.append(round(best[0] - best[1], 3))
    return {"tokens": list(final.outputs[0].token_ids), "gaps": gaps}


def in_chunks(llm, jobs: list[dict], size: int) -> list[dict]:
    """The answer for each job to its prompt in chunks of `size`."""
    return [answer(llm, job, lambda _: size) for job in jobs]


def joined(answers: dict[int, list[dict]]) -> list[dict]:
    """From answers by size of a chunk: for each job that in chunks of WHOLE, and under `cuts` those in smaller ones."""
    return [
        found | {"cuts": {str(size): answers[size][number] for size in CUTS}}
        for number, found in enumerate(answers[WHOLE])
    ]


def under(llm, job: dict, cuts: Sequence[int]) -> list[int]:
    """Tokens for a prompt whose chunks begin at 0 and at `cuts`."""
    ends = [*cuts, len(job["prompt"])]
    return answer(llm, job, lambda done: next((end - done for end in ends if end > done), WHOLE))["tokens"]


def decided(answer: dict, near_tie: float) -> int:
    """Tokens before the first choice that rounding may turn.

    That is one on which the cuts disagree, or which in one of them was ahead by less than `near_tie`, or by less than
    the cuts moved it: others move it as far again.
    """
    runs = [answer, *answer["cuts"].values()]
    for at, (tokens, gaps) in enumerate(
        zip(zip(*(run["tokens"] for run in runs)), zip(*(run["gaps"] for run in runs)))
    ):
        if len(set(tokens)) > 1 or min(gaps) < max(near_tie, max(gaps) - min(gaps)):
            return at
    return len(answer["tokens"])
