"""Requests that a real server over three stages has to get rid of: their blocks are free again, and none is left waiting."""

import pytest

from benchmarks.faults import limits, scene
from demo.checkpoint.geometry import geometry
from demo.checkpoint.write import build

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    build(folder / "checkpoint", geometry("tiny"))
    arguments = ["--max-num-queued-reqs", str(limits.LIMIT)]
    with scene.start(folder / "checkpoint", 3, folder / "serve.log", {}, arguments) as running:
        running.wait_until_healthy(scene.READY_LIMIT, lambda seconds, milestone: None)
        yield running


@pytest.mark.parametrize("phase, prompt, tokens", [("decode", 40, 5), ("prefill", 1500, 0)])
def test_a_client_that_goes_away_frees_its_blocks(server, phase, prompt, tokens):
    seen = limits.disconnect(server, phase, scene.PROMPT[:prompt], tokens)
    assert seen["held"] > 0
    assert seen["freed_s"] is not None, "the pool is not as free as at the start"


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(server):
    answer = limits.too_long(server)["answer"]
    assert answer.startswith("http: 400")
    assert "2048 tokens" in answer and "3000 input tokens" in answer


def test_an_answer_ends_with_the_model_s_length(server):
    """The prompt fits, and no answer of the length that is asked for: it gets what there is room for."""
    assert limits.too_long_with_answer(server)["answer"] == f"done: {2048 - 1500} tokens"


def test_a_burst_is_answered_or_refused_by_a_status(server):
    seen = limits.overload(server)
    refused = limits.BURST - limits.LIMIT
    assert seen["ends"] == {"503": refused, "answering": limits.LIMIT}
    assert seen["with_retry_after"] == refused
    assert limits.recovered(server)["answer"] == "done: 20 tokens"
    assert limits.load(server) == {"usage": 0, "running": 0, "preempted": 0}
