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
#: Starts a worker that beats and sleeps, says its pid, and waits to be killed.  Guarded, because the worker is spawned.
ENGINE = """
import multiprocessing, sys, time
from stage_pulse import Beating
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    clock = context.RawValue("d", 0.0)
    worker = context.Process(target=Beating(clock, time.sleep), args=(300,), daemon=True)
    worker.start()
    while not clock.value:
        time.sleep(0.05)
    first = clock.value
    time.sleep(1.2)
    print(worker.pid, clock.value > first, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def engine(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=ALONE)
    pid, beats = process.stdout.readline().split()
    yield process, int(pid), beats == "True"
    process.kill()
    process.wait()
    if psutil.pid_exists(int(pid)):
        os.kill(int(pid), signal.SIGKILL)


def test_a_worker_beats_and_ends_after_its_engine(engine):
    process, worker, beats = engine
    assert beats
    process.kill()
    process.wait()
    killed = time.monotonic()
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - killed < stage_pulse.GRACE + 4, "the worker outlived its engine"
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
