"""A worker beats, and does not outlive its engine even where its interpreter is busy."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm.v1.executor import stage_pulse

#: The module by itself: it needs the standard library only, and vllm takes its time to import.
ALONE = {**os.environ, "PYTHONPATH": str(Path(stage_pulse.__file__).parent)}
#: Starts a process that sleeps, says its pid, and waits to be killed.  Guarded, because the child is spawned.
STARTER = """
import multiprocessing, sys, time
from stage_pulse import Beating, end_with_starter
def serve():
    end_with_starter()
    time.sleep(300)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    clock = context.RawValue("d", 0.0)
    target = Beating(clock, time.sleep) if sys.argv[1] == "worker" else serve
    child = context.Process(target=target, args=(300,) if sys.argv[1] == "worker" else (), daemon=True)
    child.start()
    while sys.argv[1] == "worker" and not clock.value:
        time.sleep(0.05)
    first = clock.value
    time.sleep(1.2)
    print(child.pid, clock.value > first, flush=True)
    time.sleep(300)
"""


@pytest.fixture(params=["worker", "API server"])
def started(request, tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    command = [sys.executable, script, request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ALONE)
    pid, beats = process.stdout.readline().split()
    yield process, int(pid), beats == str(request.param == "worker")
    process.kill()
    process.wait()
    if psutil.pid_exists(int(pid)):
        os.kill(int(pid), signal.SIGKILL)


def test_a_process_ends_after_the_one_that_started_it(started):
    process, child, beats = started
    assert beats, "a worker beats, an API server has nobody who listens"
    assert psutil.pid_exists(child)
    process.kill()
    process.wait()
    killed = time.monotonic()
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - killed < stage_pulse.GRACE + 4, "it outlived the process that started it"
        time.sleep(0.1)


def test_the_end_comes_while_the_interpreter_is_held():
    """ctypes.PyDLL keeps the interpreter's lock, as an interpreter that is being taken down does."""
    code = """
import ctypes
from stage_pulse import end_within
end_within(0.3)
ctypes.PyDLL(None).poll(None, 0, 300_000)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=ALONE).returncode == -signal.SIGALRM
