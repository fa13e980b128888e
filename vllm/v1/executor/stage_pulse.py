# SPDX-License-Identifier: Apache-2.0
"""A worker's or an engine's sign of life: a clock in shared memory that a thread of the worker keeps winding.

The thread runs beside whatever the process does, from before the model is loaded.  A worker that waits for a kernel, a
disk or another stage therefore beats on; one that was stopped, or whose thread of control never lets go of the
interpreter, falls silent.  stage_watchdog.py reads the clock from the side of whoever started it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, parent_process
from typing import Any

#: Seconds between two beats.
INTERVAL = 0.5
#: Seconds that a process gets to end in good order when whoever started it is gone.
GRACE = 5.0


class Beating:
    """The target of a worker process: beats on a thread and runs the worker's own main function.

    Args:
        clock: a ctypes double in memory that both processes share; 0 until the first beat, then time.monotonic(), which
            counts the same in every process of a machine
        main: what the process is for
    """

    def __init__(self, clock: Any, main: Callable[..., None]):
        self.clock = clock
        self.main = main

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        threading.Thread(target=beat, args=(self.clock,), daemon=True, name="StagePulse").start()
        self.main(*args, **kwargs)


def beat(clock: Any) -> None:
    """Wind the clock until the process that started this one is gone, then see to it that this one does not outlive it.

    A worker reads the pipe that tells of its engine's death only once the model is loaded, and then only wakes its
    queues: one that waits for another stage would wait on as an orphan.  An engine has no such pipe.
    """
    starter = Starter()
    clock.value = time.monotonic()
    while not starter.gone(within=INTERVAL):
        clock.value = time.monotonic()
    end_within(GRACE)


def end_with_starter() -> None:
    """See to it, on a thread, that this process does not outlive the one that started it.

    For the API servers where there are several: the process that started them would have told them that the engine is
    gone, and without it they would go on accepting requests that nobody answers.
    """
    starter = Starter()

    def wait() -> None:
        while not starter.gone(within=INTERVAL):
            pass
        end_within(GRACE)

    threading.Thread(target=wait, daemon=True, name="StagePulse").start()


class Starter:
    """The process that started this one, which must be another process's child."""

    def __init__(self) -> None:
        starter = parent_process()
        assert starter is not None, "workers, engines and API servers of several are always another process's children"
        self.sentinel = starter.sentinel
        self.pid = os.getppid()

    def gone(self, within: float) -> bool:
        """Whether it ends within that many seconds."""
        # The sentinel also tells of the death of a starter whose children are another process's (forkserver); the
        # parent's id tells of it where a forked sibling still holds the sentinel's other end.
        return bool(connection.wait([self.sentinel], timeout=within)) or os.getppid() != self.pid


def end_within(seconds: float) -> None:
    """End this process in `seconds` unless it has ended by itself; returns at once.

    By the kernel's timer, whose signal ends the process where nothing handles it: a thread of ours would wait with all
    others while the interpreter is taken down, which is where a worker without its neighbour was seen to stay.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
