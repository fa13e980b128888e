"""Into how many micro-batches decoding is spread: the rule, and what is learned from rounds of a simulated pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from vllm.v1.core.sched import decode_batches
from vllm.v1.core.sched.decode_batches import RETRY, SETTLE, WINDOW, FixedBatches, MeasuredBatches, arrangements


@pytest.mark.parametrize(
    "decoding, stages, expected",
    [
        (0, 3, [1]),
        (1, 3, [1]),
        (2, 3, [2, 1]),
        (3, 3, [3, 2, 1]),
        (4, 3, [2, 1]),
        (7, 6, [4, 3, 2, 1]),
        (6, 6, [6, 3, 2, 1]),
        (8, 1, [1]),
    ],
)
def test_only_the_fewest_micro_batches_of_a_size_are_considered(decoding, stages, expected):
    assert arrangements(decoding, stages) == expected


@pytest.mark.parametrize(
    "decoding, min_batch, expected",
    [(0, 1, 1), (1, 1, 1), (2, 1, 2), (4, 1, 3), (5, 1, 3), (4, 2, 2), (5, 2, 2), (5, 3, 1), (9, 100, 1)],
)
def test_a_fixed_rule_fills_every_micro_batch_as_far_as_it_says(decoding, min_batch, expected):
    assert FixedBatches(3, min_batch).choose(decoding) == expected


class Rounds:
    """A pipeline that does what the chooser says; each round takes `ms(micro-batches, largest)`."""

    def __init__(self, monkeypatch, stages: int, ms: Callable[[int, int], float]) -> None:
        self.chooser, self.ms, self.now = MeasuredBatches(stages), ms, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, decoding: int, rounds: int, quiet: bool = True) -> list[int]:
        """Micro-batches of each round."""
        used = []
        for _ in range(rounds):
            batches = self.chooser.choose(decoding)
            used.append(batches)
            for number in range(batches):
                size = decoding // batches + (number < decoding % batches)
                self.now += self.ms(batches, -(-decoding // batches)) / batches / 1e3
                self.chooser.returned(size, quiet)
        return used


def slow_host(batches: int, most: int) -> float:
    """The way through three stages, or a turn on one for each micro-batch, with 10 ms of host time."""
    return max(3 * (2 + most), batches * (10 + 2 + most))


def slow_stages(batches: int, most: int) -> float:
    """The same with stages that take as long as they have users."""
    return max(3 * 8 * most, batches * 8 * most)


@pytest.mark.parametrize("ms, best", [(slow_host, 1), (slow_stages, 3)])
def test_the_arrangement_with_the_shortest_round_is_kept(monkeypatch, ms, best):
    used = Rounds(monkeypatch, 3, ms).run(6, RETRY)
    assert set(used[:60]) == {1, 2, 3}, "every one was tried"
    assert set(used[60:]) == {best}


def test_what_is_clearly_slower_is_left_after_a_few_rounds(monkeypatch):
    used = Rounds(monkeypatch, 3, slow_stages).run(6, RETRY)
    assert used.count(1) < SETTLE + WINDOW and used.count(3) > 100


def test_the_first_users_are_spread_and_the_next_go_where_it_paid(monkeypatch):
    run = Rounds(monkeypatch, 3, slow_host)
    assert run.run(6, 1) == [3]
    run.run(6, 100)
    assert run.run(9, 1) == [1]


def test_what_was_learned_serves_another_number_with_the_same_micro_batches(monkeypatch):
    run = Rounds(monkeypatch, 3, slow_host)
    run.run(6, 100)
    # 5 in 3 or 2 micro-batches have two or three in the largest, as 6 have; only one of 5 is new.
    assert set(run.run(5, 20)) == {1}


def test_it_is_tried_again_when_the_rounds_change(monkeypatch):
    run = Rounds(monkeypatch, 3, slow_host)
    assert run.run(6, 200)[-1] == 1
    run.ms = slow_stages
    assert run.run(6, RETRY * 4)[-1] == 3


def test_trials_of_what_lost_become_rare(monkeypatch):
    used = Rounds(monkeypatch, 3, slow_stages).run(6, 100 * RETRY)
    assert sum(batches != 3 for batches in used) / len(used) < 0.01


class Stretches(Rounds):
    """Two stages on which spreading pays, 8.1 ms against 9.7, but for stretches of its rounds that take 11 ms."""

    def __init__(self, monkeypatch, slow: set[int]) -> None:
        super().__init__(monkeypatch, 2, self._round)
        self.slow = slow
        self.turns = 0.0

    def _round(self, batches: int, most: int) -> float:
        self.turns += 1 / batches
        return 9.7 if batches == 1 else 11.0 if int(self.turns) in self.slow else 8.1


def test_a_slow_stretch_in_its_first_trial_does_not_settle_it(monkeypatch):
    """Rates on two H200s: spreading was timed in such a stretch, and the rate stayed at 0.84 of the ideal for 200 rounds."""
    used = Stretches(monkeypatch, slow=set(range(40))).run(2, 700)
    assert used[60:120] == [1] * 60
    assert used[300:].count(2) > 380


def test_a_stretch_no_longer_than_a_window_is_sat_out(monkeypatch):
    used = Stretches(monkeypatch, slow=set(range(100, 100 + WINDOW))).run(2, 145)
    assert used[60:].count(1) == 0


def test_a_small_advantage_is_no_reason_to_change(monkeypatch):
    times = {2: 100.0, 1: 98.5}
    used = Rounds(monkeypatch, 2, lambda batches, most: times[batches]).run(2, 3 * RETRY)
    changes = sum(before != after for before, after in zip(used, used[1:]))
    assert changes <= 4, used


def test_rounds_beside_a_prompt_teach_nothing(monkeypatch):
    run = Rounds(monkeypatch, 3, slow_host)
    run.run(6, 100, quiet=False)
    assert not run.chooser.times
    run.run(6, SETTLE, quiet=True)
    run.run(6, 5, quiet=False)
    assert not run.chooser.times


def test_a_changing_number_of_users_still_learns_from_a_few_rounds(monkeypatch):
    run = Rounds(monkeypatch, 3, slow_host)
    few = SETTLE + decode_batches.HOPELESS + 1
    for _ in range(20):
        run.run(6, few), run.run(3, few)
    assert {(1, 6), (1, 3)} <= set(run.chooser.times)
    assert run.run(6, 1) == [1]
