"""Who is silent for too long is killed; who works, waits or stood still with the machine is not."""

import multiprocessing
import os
import signal
import time

import pytest

from vllm.v1.executor import stage_watchdog
from vllm.v1.executor.stage_pulse import Beating
from vllm.v1.executor.stage_watchdog import LATE, PERIOD, StageWatchdog, Watched, watched

LIMIT = 5


class Clock:
    value = 100.0


class Worker:
    """A process that has not ended."""

    name = "VllmWorker-1"
    pid = 4242

    def __init__(self):
        self.killed = False
        self.sentinel, self.other_end = os.pipe()

    def kill(self):
        self.killed = True


@pytest.fixture
def worker():
    made = Worker()
    yield made
    os.close(made.sentinel)
    os.close(made.other_end)


@pytest.fixture
def work(monkeypatch):
    """Seconds of processor time of whoever is looked at; a list, so that a test can change it."""
    seconds = [0.0]
    monkeypatch.setattr(Watched, "_processor_time", lambda self: seconds[0])
    return seconds


@pytest.fixture
def watchdog(worker):
    made = StageWatchdog(LIMIT)
    made.watched.append(Watched(worker, Clock()))
    made.looked = 0.0
    return made


def test_silence_is_ended(watchdog, worker, work):
    for second in range(LIMIT + 1):
        watchdog.look(second)
    assert not worker.killed
    watchdog.look(LIMIT + 1)
    assert worker.killed


def test_beats_are_life(watchdog, worker, work):
    for second in range(3 * LIMIT):
        watchdog.watched[0].clock.value += 1
        watchdog.look(second)
    assert not worker.killed


def test_work_is_life(watchdog, worker, work):
    """As of a call that holds the interpreter while it pins memory."""
    for second in range(3 * LIMIT):
        work[0] += 0.9
        watchdog.look(second)
    assert not worker.killed


def test_a_machine_that_stood_still_is_forgiven(watchdog, worker, work):
    watchdog.look(0)
    watchdog.look(PERIOD + LATE + 100)
    assert not worker.killed


def test_a_worker_that_never_beat_is_left_to_start(watchdog, worker, work):
    watchdog.watched[0].clock = type("Unwound", (), {"value": 0.0})()
    for second in range(3 * LIMIT):
        watchdog.look(second)
    assert not worker.killed


def test_the_ended_are_not_looked_at(watchdog, worker, work):
    os.write(worker.other_end, b".")
    assert not watchdog.look(0)


def test_a_stopped_process_is_killed():
    context = multiprocessing.get_context("spawn")
    process = watched(context, 1)(target=time.sleep, args=(60,), name="VllmWorker-0", daemon=True)
    process.start()
    try:
        (entry,) = stage_watchdog._watchdogs[1].watched
        while not entry.clock.value:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        process.join(15)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()


def test_a_forked_child_watches_anew():
    """Else it would find itself in its parent's list, whose thread it does not have, and watch nobody."""
    stage_watchdog._watchdogs[77] = StageWatchdog(77)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, b"%d" % len(stage_watchdog._watchdogs))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"0"
    assert stage_watchdog._watchdogs.pop(77)


def test_no_limit_no_watching():
    context = multiprocessing.get_context("spawn")
    assert watched(context, 0) == context.Process
    assert Beating not in map(type, (watched(context, 0),))


def test_the_limit_is_checked_where_it_is_declared():
    from vllm.config import WatchdogConfig

    assert WatchdogConfig().silence_limit == 20
    with pytest.raises(ValueError, match="silence_limit"):
        WatchdogConfig(silence_limit=-1)
