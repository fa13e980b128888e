"""What holds whatever arrives: random requests, ends, aborts and preemptions through the real scheduler.

The harness itself checks at every micro-batch that all stages keep the same books.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .harness import Pipeline, Setup, token_at

run = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Arrival:
    """A request, rounds after the one before it; aborted that many rounds after it came, if at all."""

    gap: int
    prompt: int
    length: int
    priority: int
    abort: int | None


def arrivals(longest: int, aborts: bool = True):
    return st.lists(
        st.builds(
            Arrival,
            gap=st.integers(0, 12),
            prompt=st.one_of(st.integers(1, 40), st.integers(1, longest)),
            length=st.integers(1, 30),
            priority=st.integers(0, 2),
            abort=st.none() | st.integers(0, 40) if aborts else st.none(),
        ),
        min_size=1,
        max_size=12,
    )


setups = st.builds(
    Setup,
    stages=st.integers(1, 4),
    asynchronous=st.booleans(),
    budget=st.sampled_from([8, 17, 64]),
    seats=st.sampled_from([1, 3, 8]),
    states=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    options=st.builds(
        lambda batch, share: {"min_decode_batch": batch, "long_prefill_share": share},
        st.sampled_from([1, 1, 2, 5, "measured", "measured"]),
        st.sampled_from([0.1, 0.5, 1]),
    ),
)


def play(pipeline: Pipeline, requests: list[Arrival], after=lambda pipeline: None) -> set[str]:
    """Send the requests and run until nothing is left; ids of those that were aborted before they ended."""
    rounds = 0
    aborts: dict[int, list[str]] = {}
    aborted = set()

    def step() -> None:
        nonlocal rounds
        for name in aborts.pop(rounds, []):
            if name in pipeline.scheduler.requests:
                pipeline.abort(name)
                aborted.add(name)
        pipeline.step()
        after(pipeline)
        rounds += 1

    for number, request in enumerate(requests):
        for _ in range(request.gap):
            step()
        name = f"request-{number}"
        pipeline.add(name, request.prompt, request.length, number + 1, request.priority, float(number))
        if request.abort is not None:
            aborts.setdefault(rounds + request.abort, []).append(name)
    limit = rounds + 20 * sum(request.prompt + 30 * request.length for request in requests) + 200
    while pipeline.queue or pipeline.scheduler.has_requests():
        assert rounds < limit, "requests that never end"
        step()
    return aborted


def check_answers(pipeline: Pipeline, requests: list[Arrival], aborted: set[str]) -> None:
    for number, request in enumerate(requests):
        name = f"request-{number}"
        expected = [token_at(number + 1, request.prompt + position) for position in range(request.length)]
        received = pipeline.received[name]
        assert received == (expected[: len(received)] if name in aborted else expected)


@run
@given(setup=setups, requests=arrivals(600))
def test_every_request_ends_with_its_tokens_in_order_and_frees_its_blocks(pipeline, setup, requests):
    made = pipeline(setup)
    free = made.free_blocks()
    aborted = play(made, requests)
    check_answers(made, requests, aborted)
    assert made.free_blocks() == free


@run
@given(setup=setups, requests=arrivals(150))
def test_the_same_in_a_pool_that_holds_hardly_more_than_one_request(pipeline, setup, requests):
    # 16 blocks of 16 tokens, and twice that where every request also keeps states.
    made = pipeline(Setup(**(vars(setup) | {"blocks": 33 if setup.states else 16})))
    free = made.free_blocks()
    aborted = play(made, requests)
    check_answers(made, requests, aborted)
    assert made.free_blocks() == free


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption_is_among_what_the_small_pool_brings(pipeline, asynchronous):
    made = pipeline(Setup(blocks=16, asynchronous=asynchronous))
    play(made, [Arrival(0, 60, 30, 0, None)] * 5)
    assert made.preemptions


@run
@given(setup=setups, requests=arrivals(600))
def test_no_micro_batch_is_empty_while_work_waits(pipeline, setup, requests):
    made = pipeline(Setup(**(vars(setup) | {"options": {}})))
    scheduler = made.scheduler
    schedule = scheduler.schedule

    def watched(*args):
        working = [request for request in scheduler.running if scheduler._can_decode(request)]
        # A seat is all that a request in the queue needs: the pool is large, and nothing is preempted from it.
        seated = len(scheduler.running) < setup.seats and len(scheduler.waiting)
        output = schedule(*args)
        assert output.num_scheduled_tokens or not (working or seated)
        return output

    scheduler.schedule = watched
    play(made, requests)
    assert not made.preemptions


@run
@given(setup=setups, requests=arrivals(300))
def test_decoding_becomes_even_and_gives_everybody_one_token_a_round(pipeline, setup, requests):
    made = pipeline(Setup(**(vars(setup) | {"options": {}, "budget": 64})))
    stages = setup.stages
    decoding: list[frozenset[str]] = []
    scheduler = made.scheduler
    schedule = scheduler.schedule

    def watched(*args):
        decoding.append(frozenset(r.request_id for r in scheduler.running if not r.is_prefill_chunk))
        return schedule(*args)

    scheduler.schedule = watched
    play(made, requests)
    # A round after the last change everybody sits where it stays; then every window of a round is even. The last
    # token of a request is on its way for a round in which it takes no place, so look at requests that go on.
    going_on = [
        names & (decoding[n + 3 * stages] if n + 3 * stages < len(decoding) else frozenset())
        for n, names in enumerate(decoding)
    ]
    for end in range(4 * stages, len(decoding)):
        window = decoding[end - 3 * stages : end]
        if len(set(window)) > 1 or going_on[end - 1] != window[-1] or not window[-1]:
            continue
        last = made.decodes[end - stages : end]
        sizes = sorted(map(len, last))
        assert sizes[-1] - sizes[0] <= 1, sizes
        assert sorted(name for batch in last for name in batch) == sorted(window[-1])


@run
@given(setup=setups, requests=arrivals(300))
def test_who_is_kept_back_to_join_others_waits_for_two_rounds_at_most(pipeline, setup, requests):
    made = pipeline(Setup(**(vars(setup) | {"options": {"min_decode_batch": "measured"}, "budget": 64})))
    scheduler = made.scheduler
    schedule = scheduler.schedule
    waited: dict[str, int] = {}

    def watched(*args):
        ready = {request.request_id for request in scheduler.running if not request.is_prefill_chunk}
        ready = {name for name in ready if scheduler._can_decode(scheduler.requests[name])}
        output = schedule(*args)
        for name in ready:
            waited[name] = 0 if name in output.num_scheduled_tokens else waited.get(name, 0) + 1
            assert waited[name] <= 2 * setup.stages
        return output

    scheduler.schedule = watched
    play(made, requests)
