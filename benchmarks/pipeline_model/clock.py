"""Simulated time for code that reads the clock.

A scheduler that decides from measured times must measure the model's milliseconds, not those that the model takes to
compute.  So `time.monotonic`, `perf_counter`, `time` and their `_ns` forms answer with simulated time meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

CLOCKS = ("monotonic", "perf_counter", "time")
#: seconds; some code takes a time of zero for "never"
EPOCH = 1000.0


@dataclass
class Clock:
    """The time of a simulation in milliseconds, which only moves forward."""

    now_ms: float = 0.0

    def advance(self, ms: float) -> None:
        if ms < 0:
            raise ValueError(f"time cannot go back by {-ms} ms")
        self.now_ms += ms

    def reach(self, ms: float) -> None:
        """Be at `ms`, unless it is later than that."""
        self.now_ms = max(self.now_ms, ms)

    def seconds(self) -> float:
        return EPOCH + self.now_ms / 1e3

    def nanoseconds(self) -> int:
        return round(self.seconds() * 1e9)


@contextlib.contextmanager
def simulated(clock: Clock) -> Iterator[None]:
    """Every caller of the `time` module's clocks sees `clock`. For one thread: all of the process is affected."""
    with contextlib.ExitStack() as patched:
        for name in CLOCKS:
            patched.enter_context(mock.patch.object(time, name, clock.seconds))
            patched.enter_context(mock.patch.object(time, f"{name}_ns", clock.nanoseconds))
        yield
