# SPDX-License-Identifier: Apache-2.0
"""Ends processes that fell silent, so that a hung stage is found out like a dead one.

A worker that dies is noticed by its executor within moments, and everything else follows from that: requests end with
an error, /health turns bad, the server ends.  One that hangs is noticed by nobody while the model loads or while the
server is idle, and after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (five minutes) otherwise.  The watchdog makes of a hang a
death.  The engine's process watches the workers, and the server in front of it watches the engine in the same way.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from vllm.logger import init_logger
from vllm.v1.executor.stage_pulse import Beating

logger = init_logger(__name__)

#: Seconds between two looks.
PERIOD = 1.0
#: Seconds by which a look may be late before what it sees is distrusted: then the whole machine stood still.
LATE = 2.0
#: Seconds of processor time below which a silent worker counts as standing still.
STILL = 0.05


class Watched:
    """One process, a worker or an engine, and since when it has shown neither a beat nor work."""

    def __init__(self, process: BaseProcess, clock: Any):
        self.process = process
        self.clock = clock
        self.beaten = 0.0
        self.worked = 0.0
        self.since: float | None = None

    def ended(self) -> bool:
        # Not is_alive(): that reaps the child, which is the business of the thread that waits for it.
        return self.process.pid is not None and bool(connection.wait([self.process.sentinel], timeout=0))

    def silence(self, now: float) -> float:
        """Seconds without a beat or work; 0 before the process has begun to beat.

        Work counts, because a call that holds the interpreter (pinning a hundred gigabytes does) stops the beats of a
        healthy worker for as long.  It shows as processor time.
        """
        beaten = self.clock.value
        if not beaten:
            return 0.0
        worked = self._processor_time()
        if self.since is None or beaten != self.beaten or worked - self.worked > STILL:
            self.since, self.beaten, self.worked = now, beaten, worked
        return now - self.since

    def forgive(self) -> None:
        self.since = None

    def _processor_time(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return self.worked
        return times.user + times.system


class StageWatchdog:
    """Looks at the workers or engines that this process started, on a thread for as long as there are any.

    Args:
        limit: seconds of silence after which a process is killed
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.watched: list[Watched] = []
        self.lock = threading.Lock()
        self.looked = 0.0

    def watch(self, process: BaseProcess, clock: Any) -> None:
        """Look at a worker from its start, which may be still to come, to its end."""
        with self.lock:
            idle = not self.watched
            self.watched.append(Watched(process, clock))
        if idle:
            self.looked = time.monotonic()
            threading.Thread(target=self._run, daemon=True, name="StageWatchdog").start()

    def _run(self) -> None:
        # Sleeping comes first: a process that is forked while this thread starts up would inherit what it holds.
        time.sleep(PERIOD)
        while self.look(time.monotonic()):
            time.sleep(PERIOD)

    def look(self, now: float) -> bool:
        """Kill whoever has been silent for too long; whether there is anyone left to look at."""
        stood_still = now - self.looked > PERIOD + LATE
        self.looked = now
        with self.lock:
            self.watched = workers = [worker for worker in self.watched if not worker.ended()]
        for worker in workers:
            if stood_still:
                worker.forgive()
            if (silence := worker.silence(now)) > self.limit:
                logger.error(
                    "%s (pid %d) has shown no sign of life for %.0f s; killing it, which ends the server. "
                    "--watchdog-config.silence_limit sets the seconds; 0 waits for ever.",
                    worker.process.name,
                    worker.process.pid,
                    silence,
                )
                worker.process.kill()
        return bool(workers)


_watchdogs: dict[float, StageWatchdog] = {}
# A forked child has its parent's watchdogs but not their threads.
os.register_at_fork(after_in_child=_watchdogs.clear)


def watched(context: Any, limit: float) -> Callable[..., BaseProcess]:
    """What to make workers and engines with in place of `context.Process`: takes the same keyword arguments.

    Args:
        context: of multiprocessing
        limit: WatchdogConfig.silence_limit, in seconds; 0 for no watching
    """
    if not limit:
        return context.Process
    if limit not in _watchdogs:
        _watchdogs[limit] = StageWatchdog(limit)
    return partial(_make, context, _watchdogs[limit])


def _make(context: Any, watchdog: StageWatchdog, *, target: Callable[..., None], **arguments: Any) -> BaseProcess:
    clock = context.RawValue("d", 0.0)
    process = context.Process(target=Beating(clock, target), **arguments)
    watchdog.watch(process, clock)
    return process
