"""One prompt, cut at every position where a state could be lost, gives the same answer.

A request that shares its first step with a companion gets what the companion leaves of the step's token budget.  So
one engine can cut the same prompt anywhere, by the companion's length.  `chunks` in the result proves that it did.
"""

import random

import pytest

from demo.checkpoint.tokens import SPECIAL
from demo.reference import prompt_logprobs

from .checkpoints import COMPRESS_RATIO, INDEXER_BUDGET, NGRAM_CONTEXT, PLE_CONV_STATE
from .compare import AFTER_EDGE, check_answer, check_prompt
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LENGTH, ANSWER, STEP_BUDGET = 150, 4, 160
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


@pytest.fixture(scope="module", params=[1, 3], ids=["pp1", "pp3"])
def outcome(request, case, run_job):
    prompt, _, _ = case
    source = random.Random(5)
    cut_request = {"prompt": prompt, "length": ANSWER, "prompt_logprobs": True}
    batches = []
    for cut in CUTS:
        companion = [source.randrange(len(SPECIAL), 500) for _ in range(STEP_BUDGET - cut)]
        batches.append([{"prompt": companion, "length": 1}, cut_request])
    return run_job(
        "ple-early",
        batches,
        pipeline_parallel_size=request.param,
        max_num_batched_tokens=STEP_BUDGET,
        enable_prefix_caching=False,
    )


@pytest.mark.parametrize("cut", CUTS)
def test_cut(outcome, case, cut, figures):
    _, expected, expected_prompt = case
    result = outcome["batches"][CUTS.index(cut)][1]
    assert result["chunks"][:2] == [cut, LENGTH - cut]
    largest = check_answer(result, expected)
    difference = check_prompt(result, expected_prompt)
    assert difference.after(cut) <= AFTER_EDGE or cut >= LENGTH - 1
    figures("cuts", largest, str(difference))


def test_block_edge_is_among_the_cuts(outcome):
    assert outcome["block_size"] == BLOCK
