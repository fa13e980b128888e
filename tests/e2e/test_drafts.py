"""With drafts of the checkpoint's own module, greedy tokens stay transformers', and drafts are really accepted.

The draft module of these checkpoints is right about half of the time (demo/checkpoint/formats/mtp.py), so both what
follows an accepted draft and what follows a rejected one is computed: recurrent states, n-grams, index keys and K/V.
"""

import pytest

from demo.checkpoint.formats import mtp
from demo.checkpoint.write import build

from .checkpoints import SHAPES
from .compare import check_answer
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ANSWER = 16
BLOCK = 128
#: K/V, stages, drafts a step.  One of both numbers of stages, of both kinds of K/V, and of one draft and more.
RUNS = [("auto", 1, 1), ("int8_per_token_head", 2, 3)]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts") / "with-module"
    build(folder, SHAPES["ple-early"])
    mtp.add(folder)
    return folder


@pytest.fixture(scope="module")
def requests(references):
    """Shorter than a chunk, and past a cache block and the indexer's budget."""
    return [decisive(references("ple-early"), length, ANSWER, seed=length) for length in (20, 150)]


@pytest.mark.parametrize(("cache_dtype", "stages", "drafts"), RUNS)
def test_tokens_are_those_without_drafts(cache_dtype, stages, drafts, drafting, requests, run_job):
    batch = [{"prompt": prompt, "length": ANSWER} for prompt, _ in requests]
    done = run_job(
        drafting,
        [batch, batch],
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts},
        kv_cache_dtype=cache_dtype,
        pipeline_parallel_size=stages,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    first, again = done["batches"]
    for results in (first, again):
        for result, (_, expected) in zip(results, requests, strict=True):
            check_answer(result, expected)
    # The state behind a block was stored before any draft of the request was verified.
    assert [result["cached"] for result in again] == [0, BLOCK]
    steps = sum(chunk == 1 + drafts for result in first for chunk in result["chunks"])
    fewest, most = 2 * ANSWER / (1 + drafts), 2 * ANSWER
    assert fewest < steps < most, "all drafts were accepted, or none, so half of what may go wrong was not tried"
