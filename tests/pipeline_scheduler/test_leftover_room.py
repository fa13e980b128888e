"""Small decisions that show only where micro-batches are tight: who of those ready goes, and where tokens are left."""

from __future__ import annotations

import pytest

from .harness import Setup

STAGES, BUDGET, BLOCK = 3, 64, 16
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@MODES
def test_users_decode_beside_a_prompt_that_was_there_before_them(pipeline, asynchronous):
    """The prompt comes first in every micro-batch, and would take all of it if nothing were set aside."""
    made = pipeline(Setup(stages=STAGES, budget=BUDGET, asynchronous=asynchronous))
    made.add("long", 3000, 1, seed=7)
    made.run(2)
    users = [f"user-{number}" for number in range(5)]
    for number, name in enumerate(users):
        made.add(name, 8, 60, seed=number, arrival=1.0 + number)
    made.run(20)
    assert [request.request_id for request in made.scheduler.running][0] == "long"
    start = len(made.batches)
    made.run(8 * STAGES)
    for first in range(start, start + 8 * STAGES - STAGES, STAGES):
        decoded = sorted(name for batch in made.decodes[first : first + STAGES] for name in batch)
        assert decoded == users, "one token each in every round"
    assert all(sum(batch.values()) == BUDGET for batch in made.batches[start:])
    made.run()


@MODES
def test_what_a_whole_block_leaves_goes_to_the_next_prompt(pipeline, asynchronous):
    """Chunks end where a state is kept; beside a user who decodes, that leaves tokens in every micro-batch."""
    made = pipeline(
        Setup(stages=STAGES, budget=BUDGET, block=BLOCK, blocks=1500, states=True, asynchronous=asynchronous)
    )
    for number in range(STAGES):
        made.add(f"user-{number}", 8, 200, seed=number)
    made.run(12)
    made.add("first", 900, 1, seed=10, arrival=1.0)
    made.add("second", 900, 1, seed=11, arrival=2.0)
    made.run(4)
    for batch in made.batches[-1:] + run_on(made, 12):
        assert batch["first"] == BUDGET - BLOCK, "the whole blocks beside one decode token"
        assert batch.get("second", 0) > 0, "all that is left was the first prompt's share"
    made.run()


def run_on(made, steps: int) -> list[dict[str, int]]:
    start = len(made.batches)
    made.run(steps)
    return made.batches[start:]


def next_round(pipeline, policy: str = "fcfs", priority: int = 0) -> list[list[str]]:
    """Who decodes next, where four users go in a settled round of two, one and one, and two more become ready.

    They do so together with the first two. Six on three micro-batches are two in each, so two of four stay behind, and
    one of three in the next.
    """
    made = pipeline(Setup(stages=STAGES, budget=BUDGET, policy=policy))
    for number in range(4):
        made.add(f"user-{number}", 8, 100, seed=number)
    made.run(20)
    while made.decodes[-1] != ["user-3"]:
        made.step()
    for number in range(2):
        made.add(f"new-{number}", 8, 100, seed=9 + number, arrival=9.0 + number, priority=priority)
    made.step()
    assert sorted(made.batches[-1]) == ["new-0", "new-1", "user-0", "user-1"], "prompts, beside two who decode"
    made.run(2)
    start = len(made.decodes)
    made.run(STAGES)
    return [sorted(names) for names in made.decodes[start:]]


def test_whoever_waited_longest_goes_first(pipeline):
    """In the order in which they came, the last of them would be left behind twice."""
    assert next_round(pipeline) == [["user-0", "user-1"], ["new-0", "new-1"], ["user-2", "user-3"]]


@pytest.mark.parametrize(
    "priority, expected",
    [
        (-1, [["new-0", "new-1"], ["user-0", "user-1"], ["user-2", "user-3"]]),
        (1, [["user-0", "user-1"], ["new-0", "user-2"], ["new-1", "user-3"]]),
    ],
)
def test_priority_goes_before_waiting(pipeline, priority, expected):
    assert next_round(pipeline, "priority", priority) == expected
