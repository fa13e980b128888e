"""One prompt, cut at every position where a state could be lost, gives the same answer.

A request that shares its first step with a companion gets what the companion leaves of the step's token budget.  So
one engine can cut the same prompt anywhere, by the companion's length.  `chunks` in the result proves that it did.
"""

import random
from functools import cache

import pytest

from demo.checkpoint.tokens import SPECIAL
from demo.reference import prompt_logprobs

from .checkpoints import COMPRESS_RATIO, INDEXER_BUDGET, NGRAM_CONTEXT, PLE_CONV_STATE
from .compare import AFTER_EDGE, check_answer, check_prompt
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

LENGTH, ANSWER, STEP_BUDGET = 140, 2, 144
#: What the engine reports for this geometry; `test_block_edge_is_among_the_cuts` holds it.
BLOCK = 128

CUTS = sorted(
    {
        # n-gram context 2, compressed blocks of 4, convolution state 9: all residues, and beyond each length
        *range(1, PLE_CONV_STATE + COMPRESS_RATIO + 1),
        # the budget fills: from here on the indexer leaves blocks out
        *range(INDEXER_BUDGET - 1, INDEXER_BUDGET + COMPRESS_RATIO + 2),
        # a cache block ends
        *range(BLOCK - NGRAM_CONTEXT, BLOCK + COMPRESS_RATIO + 1),
        # the last chunk is shorter than the convolution state, than a compressed block, one token
        LENGTH - PLE_CONV_STATE + 1,
        LENGTH - COMPRESS_RATIO + 1,
        LENGTH - 1,
    }
)


@pytest.fixture(scope="module")
def case(references):
    prompt, expected = decisive(references("ple-early"), LENGTH, ANSWER, seed=21)
    return prompt, expected, prompt_logprobs(references("ple-early"), prompt)


#: Stages, and which cuts: a step over three stages costs three times as much on two cores, and what a cut can lose
#: is per layer, so there every third one will do.
RUNS = [(1, cut) for cut in CUTS] + [(3, cut) for cut in CUTS[::3]]


@pytest.fixture(scope="module")
def outcome(case, run_job):
    """Results by number of stages, each made when it is first asked for."""
    return cache(lambda stages: run_cuts(case[0], stages, run_job))


def run_cuts(prompt: list[int], stages: int, run_job) -> dict:
    source = random.Random(5)
    cut_request = {"prompt": prompt, "length": ANSWER, "prompt_logprobs": True}
    batches = []
    cuts = [cut for number, cut in RUNS if number == stages]
    for cut in cuts:
        companion = [source.randrange(len(SPECIAL), 500) for _ in range(STEP_BUDGET - cut)]
        batches.append([{"prompt": companion, "length": 1}, cut_request])
    done = run_job(
        "ple-early",
        batches,
        pipeline_parallel_size=stages,
        max_num_batched_tokens=STEP_BUDGET,
        enable_prefix_caching=False,
    )
    return {"block_size": done["block_size"]} | {
        cut: result for cut, (_, result) in zip(cuts, done["batches"], strict=True)
    }


@pytest.mark.parametrize(("stages", "cut"), RUNS)
def test_cut(outcome, case, stages, cut, figures):
    _, expected, expected_prompt = case
    result = outcome(stages)[cut]
    assert result["chunks"][:2] == [cut, LENGTH - cut]
    largest = check_answer(result, expected)
    difference = check_prompt(result, expected_prompt)
    assert difference.after(cut) <= AFTER_EDGE or cut >= LENGTH - 1
    figures(f"cuts, {stages} stage(s)", largest, str(difference))


def test_block_edge_is_among_the_cuts(outcome):
    assert outcome(1)["block_size"] == BLOCK
