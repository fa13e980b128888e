"""A silent stage is killed by its sentry; one that works, waits or stood still with its machine is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vllm.v1.executor import stage_sentry
from vllm.v1.executor.stage_sentry import LATE, PERIOD, STILL, Silence, processor_time

LIMIT = 5


def test_silence_grows_without_beats_and_work():
    silence = Silence(now=0.0, worked=1.0)
    assert [silence.look(second, beaten=False, worked=1.0) for second in range(1, 5)] == [1, 2, 3, 4]


def test_a_beat_ends_it():
    silence = Silence(0.0, 1.0)
    silence.look(2.0, beaten=False, worked=1.0)
    assert silence.look(3.0, beaten=True, worked=1.0) == 0


def test_work_ends_it_and_a_trace_of_it_does_not():
    silence = Silence(0.0, 1.0)
    assert silence.look(2.0, beaten=False, worked=1.0 + STILL / 2) == 2
    assert silence.look(3.0, beaten=False, worked=1.0 + 2 * STILL) == 0


def test_a_machine_that_stood_still_is_forgiven():
    silence = Silence(0.0, 1.0)
    assert silence.look(PERIOD + LATE + 100, beaten=False, worked=1.0) == 0


def test_what_was_seen_before_still_counts():
    """On a busy machine a look is often late; starting again each time, a hang was found after 31 s instead of 20."""
    silence = Silence(0.0, 1.0)
    silence.look(3.0, beaten=False, worked=1.0)
    assert silence.look(3.0 + PERIOD + LATE + 1, beaten=False, worked=1.0) == 3


def test_processor_time_of_a_name_with_parentheses(tmp_path):
    """A process names itself, and the name stands between the numbers."""
    assert processor_time(os.getpid()) > 0
    with pytest.raises(OSError):
        processor_time(2**22 + 1)


@pytest.fixture
def stage():
    """A process that sleeps, and its sentry with a limit of two seconds."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sentry = subprocess.Popen(
        [sys.executable, "-I", stage_sentry.__file__, str(sleeper.pid), "2"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield sleeper, sentry
    for process in (sleeper, sentry):
        process.kill()
        process.wait()


def test_a_silent_process_is_killed_and_the_setting_named(stage):
    sleeper, sentry = stage
    assert sleeper.wait(20) == -signal.SIGKILL
    assert "--watchdog-config.silence_limit" in sentry.stderr.read()


def test_the_sentry_ends_with_whom_it_watches(stage):
    sleeper, sentry = stage
    sentry.stdin.close()
    assert sentry.wait(10) == 0
    assert sleeper.poll() is None


def test_beats_keep_it_alive(stage):
    sleeper, sentry = stage
    for _ in range(8):
        sentry.stdin.write(".")
        sentry.stdin.flush()
        time.sleep(0.5)
    assert sleeper.poll() is None
