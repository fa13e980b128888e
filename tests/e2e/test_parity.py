"""Greedy tokens and log-probabilities are transformers', on one stage and on several.

Every engine of `ENGINES` gets the same requests: alone, packed with others, and repeated (which reads the prefix cache
where there is one).  The long prompts are past the indexer's budget of 64 tokens and past one cache block of 128.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from demo.reference import prompt_logprobs

from .compare import check_answer, check_prompt
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ANSWER = 12


@dataclass(frozen=True)
class Engine:
    checkpoint: str
    stages: int
    partition: str | None
    chunk: int
    prefix_caching: bool
    #: what this one is for, among the others
    why: str
    arguments: dict[str, Any] = field(default_factory=dict)


ENGINES = {
    "pp1": Engine("ple-early", 1, None, 64, False, "no pipeline: what a disagreement elsewhere is judged by"),
    "pp2-5,7": Engine("ple-late", 2, "5,7", 512, True, "uneven; PLE on the last stage; whole prompts in one step"),
    "pp2-6,6": Engine("ple-late", 2, "6,6", 37, True, "even; PLE on the first stage, last layer; odd chunks"),
    "pp3-4,4,4": Engine("ple-late", 3, None, 64, False, "even, vLLM's own division; PLE on the middle stage"),
    "pp3-2,4,6": Engine("ple-early", 3, "2,4,6", 16, True, "uneven; the first stage has PLE and no QSA layer"),
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request) -> Engine:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def requests(references):
    """Prompts with their references, per checkpoint; see prompts.py for what decisive means."""
    made: dict[str, list] = {}

    def get(name: str):
        if name not in made:
            model = references(name)
            made[name] = [
                decisive(model, 170, ANSWER, seed=1),
                decisive(model, 131, ANSWER, seed=2),
                decisive(model, 23, ANSWER, seed=3),
                decisive(model, 70, ANSWER, seed=4, with_end_of_text=True),
                # Shorter than an n-gram's reach and than one compressed block.
                decisive(model, 2, ANSWER, seed=5),
            ]
        return made[name]

    return get


ALONE, PACKED, AGAIN, LONGER = range(4)


@pytest.fixture(scope="module")
def outcome(engine, requests, run_job):
    """Results of four batches, in the order of the constants above."""
    asked = [{"prompt": prompt, "length": ANSWER} for prompt, _ in requests(engine.checkpoint)]
    first, answer = asked[0]["prompt"], requests(engine.checkpoint)[0][1].tokens
    batches = [
        [asked[0] | {"prompt_logprobs": True}],
        asked,
        asked[:2],
        # As the next turn of a conversation: the prompt, its answer's first tokens, and on.
        [{"prompt": first + answer[:4], "length": ANSWER - 4}],
    ]
    return run_job(
        engine.checkpoint,
        batches,
        partition=engine.partition,
        pipeline_parallel_size=engine.stages,
        max_num_batched_tokens=engine.chunk,
        enable_prefix_caching=engine.prefix_caching,
        **engine.arguments,
    )["batches"]


def test_alone(outcome, engine, requests, references, figures):
    (result,) = outcome[ALONE]
    prompt, expected = requests(engine.checkpoint)[0]
    largest = check_answer(result, expected)
    difference = check_prompt(result, prompt_logprobs(references(engine.checkpoint), prompt))
    figures(f"{engine.stages} stage(s), {engine.partition or 'even'}", largest, str(difference))


def test_long_prompt_came_in_chunks(outcome, engine):
    chunks = outcome[ALONE][0]["chunks"]
    prefill = chunks[: len(chunks) - (ANSWER - 1)]
    assert sum(prefill) == 170
    assert max(prefill) <= engine.chunk
    assert len(prefill) == -(-170 // engine.chunk) or engine.prefix_caching


def test_packed_with_others(outcome, engine, requests, figures):
    expected = [reference for _, reference in requests(engine.checkpoint)]
    largest = max(check_answer(result, one) for result, one in zip(outcome[PACKED], expected, strict=True))
    figures(f"{engine.stages} stage(s), {engine.partition or 'even'}, five requests", largest, "")


def test_again_from_the_prefix_cache(outcome, engine, requests):
    for result, (_, expected) in zip(outcome[AGAIN], requests(engine.checkpoint), strict=False):
        assert bool(result["cached"]) == engine.prefix_caching
        check_answer(result, expected)


def test_next_turn_continues_the_answer(outcome, engine, requests):
    (result,) = outcome[LONGER]
    assert bool(result["cached"]) == engine.prefix_caching
    assert result["tokens"] == requests(engine.checkpoint)[0][1].tokens[4:]
