"""The scheduler ends damaged requests, and nothing else changes for the rest."""

import pytest

from tests.pipeline_scheduler.harness import Setup, token_at
from vllm.v1.core.sched.damaged_requests import CODE
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics import ngram_table

SETUPS = pytest.mark.parametrize(
    "setup",
    [Setup(stages=1), Setup(stages=3, asynchronous=True), Setup(stages=2, asynchronous=True, states=True)],
    ids=["one stage", "three stages, async", "two stages, async, prefix cache"],
)


def expect_whole(line, name: str, prompt: int, length: int) -> None:
    assert line.received[name] == [token_at(line.seeds[name], prompt + i) for i in range(length)]


@SETUPS
@pytest.mark.parametrize("steps", [1, 9], ids=["in the prompt", "in the answer"])
def test_the_damaged_request_ends_alone(pipeline, setup, steps):
    line = pipeline(setup)
    free = line.free_blocks()
    for number, name in enumerate(("bad", "good", "late")):
        line.add(name, 40 + 30 * number, 12, seed=number)
    line.run(steps)
    sent = len(line.received["bad"])
    line.damaged.add("bad")
    line.run()
    assert line.errors.keys() == {"bad"} and line.errors["bad"].code == CODE
    assert "NaN or infinity" in line.errors["bad"].message
    # What came before is whole; nothing came after.
    expect_whole(line, "bad", 40, sent)
    expect_whole(line, "good", 70, 12)
    expect_whole(line, "late", 100, 12)
    assert line.free_blocks() == free


def test_a_row_that_could_not_be_read_is_the_reason_given(pipeline, monkeypatch):
    monkeypatch.setattr(ngram_table, "reason", {"bad": "Reading a row failed: offset 7."}.get)
    line = pipeline(Setup(stages=1))
    for number, name in enumerate(("bad", "worse")):
        line.add(name, 40, 12, seed=number)
    line.run(3)
    line.damaged |= {"bad", "worse"}
    line.run()
    assert line.errors["bad"].message.startswith("Reading a row failed: offset 7. So the request was ended")
    assert "NaN or infinity" in line.errors["worse"].message and line.errors["bad"].code == CODE


def test_its_blocks_are_not_found_again(pipeline):
    """The same prompt later is computed anew: the cache might hold the damage."""
    line = pipeline(Setup(stages=1, states=True))
    for name in ("first", "second"):
        line.add(name, 100, 4)
        line.run()
    assert sum(batch.get("second", 0) for batch in line.batches) < 100
    line.add("bad", 100, 40)
    line.run(3)
    line.damaged.add("bad")
    line.run()
    assert line.errors.keys() == {"bad"}
    line.add("again", 100, 4)
    line.run()
    assert sum(batch.get("again", 0) for batch in line.batches) >= 100
    expect_whole(line, "again", 100, 4)


def test_a_request_that_ended_meanwhile_is_left_alone(pipeline):
    """Its last micro-batches come back after it was aborted."""
    line = pipeline(Setup(stages=3, asynchronous=True))
    line.add("gone", 40, 30)
    line.add("good", 40, 12, seed=1)
    line.run(8)
    line.damaged.add("gone")
    line.abort("gone")
    line.run()
    assert not line.errors
    expect_whole(line, "good", 40, 12)


def test_any_scheduler_ends_them(pipeline):
    """The edit is in the class that others inherit from."""
    line = pipeline(Setup(stages=1), Scheduler)
    line.add("bad", 40, 12)
    line.damaged.add("bad")
    line.run()
    assert line.errors.keys() == {"bad"} and line.received["bad"] == []
