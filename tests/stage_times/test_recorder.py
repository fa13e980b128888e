"""Parts sum to steps and steps to the interval, however phases nest, fail or are left open."""

import random

import pytest

from vllm.v1.stage_times import recorder as module
from vllm.v1.stage_times.recorder import OTHER, Recorder, time_entering, time_methods, timed


@pytest.fixture
def recorder(clock):
    return Recorder("stage 0")


def totals(recorder, kind):
    return {phase: pytest.approx(series.total) for phase, series in recorder.phases[kind].items()}


def test_a_nested_phase_is_not_charged_to_the_outer_one(recorder, clock):
    inner = timed(recorder, "inner", clock.work(2))

    def outer_work():
        clock.now += 1
        inner()
        clock.now += 4

    timed(recorder, "outer", outer_work)()
    clock.now += 0.5
    recorder.finish("decode")
    assert totals(recorder, "decode") == {"outer": 5, "inner": 2, OTHER: 0.5}
    assert recorder.wholes["decode"].total == pytest.approx(7.5)


def test_random_nesting_sums(recorder, clock):
    dice = random.Random(0)

    def nest(depth):
        for _ in range(dice.randint(0, 3)):
            clock.now += dice.random()
            if depth:
                timed(recorder, dice.choice("abc"), lambda: nest(depth - 1))()

    for _ in range(50):
        nest(3)
        recorder.finish(dice.choice(["decode", "empty"]))
    for kind, whole in recorder.wholes.items():
        parts = sum(series.total for series in recorder.phases[kind].values())
        assert parts == pytest.approx(whole.total)
    assert sum(whole.total for whole in recorder.wholes.values()) == pytest.approx(recorder.ended - recorder.began)
    assert recorder.ended == clock.now


def test_time_before_a_step_belongs_to_it(recorder, clock):
    recorder.finish("decode")
    clock.now += 3
    recorder.finish("decode")
    assert recorder.wholes["decode"].count == 2 and recorder.wholes["decode"].total == pytest.approx(3)


def test_a_failing_phase_ends(recorder, clock):
    def fail():
        clock.now += 1
        raise KeyError

    with pytest.raises(KeyError):
        timed(recorder, "broken", fail)()
    clock.now += 1
    recorder.finish("decode")
    assert totals(recorder, "decode") == {"broken": 1, OTHER: 1}


def test_the_end_of_a_step_closes_what_is_open(recorder, clock):
    recorder.begin("pause")
    clock.now += 1
    recorder.finish("empty")
    recorder.end()
    clock.now += 1
    recorder.finish("empty")
    assert totals(recorder, "empty") == {"pause": 1, OTHER: 1}


def test_reset_forgets_and_keeps_what_is_open(recorder, clock):
    recorder.finish("decode")
    recorder.begin("wait")
    clock.now += 5
    recorder.reset()
    assert not recorder.wholes and recorder.began == clock.now
    clock.now += 1
    recorder.end()
    recorder.finish("call")
    assert totals(recorder, "call")["wait"] == 1
    assert recorder.wholes["call"].total == pytest.approx(1)


def test_only_the_last_steps_are_kept_and_all_counted(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 4)
    series = module.Series()
    for value in range(10):
        series.add(value)
    assert sorted(series.kept) == [6, 7, 8, 9] and series.count == 10 and series.total == 45


def test_only_entering_is_charged(recorder, clock):
    class Lock:
        def __enter__(self):
            clock.now += 2
            return "buffer"

        def __exit__(self, *raised):
            clock.now += 1

    class Queue:
        def acquire_read(self, timeout):
            return Lock()

        def dequeue(self):
            with self.acquire_read(1) as buffer:
                clock.now += 4
            return buffer

    queue = Queue()
    time_entering(recorder, queue, "acquire_read", "wait")
    time_methods(recorder, queue, dequeue="deserialise")
    assert queue.dequeue() == "buffer"
    recorder.finish("decode")
    assert totals(recorder, "decode") == {"wait": 2, "deserialise": 5, OTHER: 0}


def test_a_renamed_method_is_an_error(recorder):
    with pytest.raises(AttributeError, match="acquire"):
        time_methods(recorder, object(), acquire="wait")
