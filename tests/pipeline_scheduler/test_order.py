"""Who waits for whom: short prompts behind long ones, equals, priorities, and decoding beside a long prompt."""

from __future__ import annotations

import math

import pytest

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.decode_spread import quota
from vllm.v1.core.sched.prefill_shares import Prefill, divide
from vllm.v1.core.sched.scheduler import Scheduler

from .harness import Setup

STAGES, BUDGET = 3, 64
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def setup(asynchronous: bool, **changes) -> Setup:
    return Setup(**({"stages": STAGES, "budget": BUDGET, "asynchronous": asynchronous} | changes))


def first_token_of_short(made, longs: int, prompt: int) -> int:
    """Micro-batches between a short request's arrival behind long ones and its first token."""
    for number in range(longs):
        made.add(f"long-{number}", 3500, 4, seed=number, arrival=float(number))
    made.run(6)
    sent = len(made.batches)
    made.add("short", prompt, 4, seed=99, arrival=100.0)
    made.run()
    return made.first_token["short"] - sent


@MODES
@pytest.mark.parametrize("longs", [1, 3])
@pytest.mark.parametrize("states", [False, True], ids=["attention", "attention and states"])
def test_a_short_prompt_waits_for_its_own_work_and_one_round(pipeline, asynchronous, longs, states):
    chosen = setup(asynchronous, states=states)
    waited = first_token_of_short(pipeline(chosen), longs, 150)
    # Half of each micro-batch is its own; the round is the time its last chunk needs through the stages.
    assert waited <= math.ceil(150 / (BUDGET / 2)) + STAGES + 2
    if not states:
        stock = AsyncScheduler if asynchronous else Scheduler
        assert first_token_of_short(pipeline(chosen, stock), longs, 150) >= 3500 / BUDGET - 6


@MODES
def test_a_share_of_one_is_first_come_first_served(pipeline, asynchronous):
    chosen = setup(asynchronous, options={"long_prefill_share": 1})
    assert first_token_of_short(pipeline(chosen), 1, 150) >= 3500 / BUDGET - 6


@MODES
def test_a_stream_of_short_prompts_slows_a_long_one_by_its_share_only(pipeline, asynchronous):
    made = pipeline(setup(asynchronous))
    made.add("long", 2000, 1)
    number = 0
    while "long" not in made.first_token:
        if len(made.scheduler.waiting) < 2:
            made.add(f"short-{number}", 60, 1, seed=number, arrival=1.0 + number)
            number += 1
        made.step()
    assert number > 20
    # Half of what single tokens of decoding leave; a short prompt may take part of a micro-batch it does not fill.
    assert made.first_token["long"] <= 2000 / (BUDGET / 2 - 4) + STAGES + 2
    made.run()


@MODES
def test_equal_prompts_are_served_in_order_of_arrival(pipeline, asynchronous):
    made = pipeline(setup(asynchronous))
    for number in range(5):
        made.add(f"{number}", 400, 3, seed=number, arrival=float(number))
    made.run()
    order = sorted(made.first_token, key=made.first_token.get)
    assert order == ["0", "1", "2", "3", "4"]
    # One after the other and not side by side: the first ends as if alone.
    assert made.first_token["0"] <= 400 / BUDGET + STAGES + 2


@MODES
def test_priority_goes_before_arrival(pipeline, asynchronous):
    made = pipeline(setup(asynchronous, policy="priority"))
    made.add("later", 2000, 2, seed=1, priority=5, arrival=0.0)
    made.run(6)
    sent = len(made.batches)
    made.add("now", 600, 2, seed=2, priority=0, arrival=1.0)
    made.run()
    # The whole budget, although it is neither first nor much shorter.
    assert made.first_token["now"] - sent <= math.ceil(600 / BUDGET) + STAGES + 2


@MODES
def test_decoding_goes_on_beside_a_long_prompt(pipeline, asynchronous):
    made = pipeline(setup(asynchronous))
    for number in range(5):
        made.add(f"user-{number}", 8, 40, seed=number, arrival=1.0 + number)
    made.run(12)
    made.add("long", 2000, 2, seed=77, arrival=0.0)
    start = len(made.batches)
    made.run(30)
    for round_start in range(start + STAGES, start + 24, STAGES):
        decoded = sorted(name for batch in made.decodes[round_start : round_start + STAGES] for name in batch)
        assert decoded == [f"user-{number}" for number in range(5)]
    assert all(sum(batch.values()) == BUDGET for batch in made.batches[start + 1 : start + 24])
    made.run()


@MODES
def test_decoding_in_every_micro_batch_does_not_stop_a_prompt_of_whole_blocks(pipeline, asynchronous):
    """Block and budget alike: beside a decoding user there is never room for a whole block."""
    made = pipeline(setup(asynchronous, states=True, block=BUDGET, blocks=200))
    for number in range(STAGES):
        made.add(f"user-{number}", 8, 300, seed=number)
    made.run(12)
    made.add("prompt", 500, 1, seed=9, arrival=1.0)
    made.run()
    assert made.first_token["prompt"] < 60


@MODES
def test_a_long_chat_whose_past_is_cached_is_a_short_prompt(pipeline, asynchronous):
    made = pipeline(setup(asynchronous, states=True, blocks=1500))
    made.add("past", 2000, 1, seed=3)
    made.run()
    made.add("long", 3500, 1, seed=4, arrival=1.0)
    made.run(6)
    sent = len(made.batches)
    # The same tokens and 100 more, which is too much beside the long one if the past were to be computed again.
    made.add("next", 2100, 1, seed=3, arrival=2.0)
    made.run()
    assert made.first_token["next"] - sent <= math.ceil(116 / (BUDGET / 2)) + STAGES + 2


@MODES
def test_a_request_that_finds_no_blocks_does_not_stop_the_one_that_holds_them(pipeline, asynchronous):
    made = pipeline(setup(asynchronous, blocks=130, policy="priority"))
    made.add("low", 1200, 4, seed=1, priority=1)
    made.run(12)
    # First in line for every token, and too long for the blocks that are left until "low" ends.
    made.add("high", 1500, 1, seed=2, priority=0, arrival=1.0)
    made.run()
    assert made.first_token["low"] <= 1200 / BUDGET * 1.5 + STAGES + 2


@MODES
def test_once_blocks_are_there_again_a_short_prompt_passes_a_long_one(pipeline, asynchronous):
    """A request that found no blocks holds up the queue for a round, not for as long as the long one lasts."""
    made = pipeline(setup(asynchronous))
    made.add("long", 2000, 1, seed=1)
    made.run(4)
    made.scheduler._queue_stuck = STAGES
    sent = len(made.batches)
    made.add("short", 60, 1, seed=3, arrival=2.0)
    made.run()
    assert STAGES < made.first_token["short"] - sent <= STAGES + 2 + STAGES + 2 < made.first_token["long"] - sent


@MODES
@pytest.mark.parametrize("threshold, others", [(16, 48), (0, 0)])
def test_upstreams_threshold_limits_each_chunk_and_leaves_the_rest_to_equals(pipeline, asynchronous, threshold, others):
    made = pipeline(setup(asynchronous))
    made.scheduler.scheduler_config.long_prefill_token_threshold = threshold
    for number in range(4):
        made.add(f"{number}", 500, 1, seed=number, arrival=float(number))
    made.run(2)
    assert sum(tokens for name, tokens in made.batches[-1].items() if name != "0") == others
    made.run()


def test_merging_keeps_decoding_in_fewer_micro_batches(pipeline):
    made = pipeline(setup(False, options={"min_decode_batch": 3}))
    for number in range(6):
        made.add(f"{number}", 10, 30, seed=number)
    made.run(40)
    assert sorted(map(len, made.decodes[-STAGES:])) == [0, 3, 3]
    made.run()


@pytest.mark.parametrize(
    "decoding, in_flight, batches, expected",
    [
        (6, [0, 0], 3, 2),
        (4, [0, 0], 3, 2),
        (4, [2, 0], 3, 1),
        (4, [2, 1], 3, 1),
        (1, [0, 0], 1, 1),
        (2, [1, 0], 2, 1),
        (4, [0, 0], 2, 2),
        (4, [2, 0], 2, 2),
        (5, [2, 0], 2, 3),
        (4, [2, 2], 2, 0),
        (4, [1, 1], 1, 0),
        (4, [0, 0], 1, 4),
        (0, [0, 0], 1, 0),
    ],
)
def test_quota(decoding, in_flight, batches, expected):
    assert quota(decoding, in_flight, batches) == expected


def shares(*prefills: Prefill, budget: int = 100, seats: int = 9, share: float = 0.5, chunk: int = 100) -> list[int]:
    return list(divide(prefills, budget, seats, share, chunk).values())


def test_shares():
    long, short, shorter = Prefill("a", 900), Prefill("b", 80), Prefill("c", 20)
    assert shares() == []
    assert shares(long) == [100]
    assert shares(long, short) == [50, 50]
    assert shares(long, shorter) == [80, 20], "what short prompts do not need goes to the first in line"
    assert shares(long, short, shorter) == [50, 30, 20], "the shortest first"
    assert shares(short, long) == [80, 20], "whoever is first and short is served whole"
    assert shares(long, Prefill("b", 800)) == [100, 0], "of like length: in order"
    assert shares(long, short, share=1) == [100, 0]
    assert shares(long, short, budget=1) == [1, 0]
    assert shares(long, short, chunk=30) == [30, 30]


def test_shares_and_priorities():
    assert shares(Prefill("a", 900), Prefill("b", 10, priority=1)) == [100, 0], "a lower priority gets what is left"
    assert shares(Prefill("a", 60), Prefill("b", 900, priority=1)) == [60, 40]


def test_shares_and_seats():
    long, queued = Prefill("a", 900), Prefill("b", 20, needs_seat=True)
    assert shares(long, queued, seats=0) == [100, 0]
    assert shares(long, queued, Prefill("c", 10, needs_seat=True), seats=1) == [90, 0, 10]
    lower = Prefill("d", 10, priority=1, needs_seat=True)
    assert shares(queued, lower, seats=1) == [20, 0], "the one seat was taken by a higher priority"
    assert shares(queued, lower, seats=2) == [20, 10]
