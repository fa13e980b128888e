# SPDX-License-Identifier: Apache-2.0
"""Exclusive times of nested phases, step by step.

A step begins where the one before it ended, so steps tile the interval.  At every moment of it one phase is charged:
the innermost open one, or OTHER where none is.  So the phases of a step sum to the step and the steps to the interval,
whatever is timed and however it nests; what nobody thought of shows as OTHER.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

OTHER = "other"
#: Of how many steps percentiles are taken: the last ones.
KEPT = 8192


class Series:
    """Durations of one thing: all are counted and summed, the last KEPT remembered."""

    __slots__ = ("count", "kept", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.kept = array("d")

    def add(self, seconds: float) -> None:
        if self.count < KEPT:
            self.kept.append(seconds)
        else:
            self.kept[self.count % KEPT] = seconds
        self.count += 1
        self.total += seconds


class Recorder:
    """Times of one thread.

    Args:
        part: whose, for people: "engine core", "stage 0"
        clock: gives seconds; time.perf_counter unless said
    """

    def __init__(self, part: str, clock: Callable[[], float] | None = None) -> None:
        self.part = part
        self.clock = clock or time.perf_counter
        #: Called after every step with this recorder; for the log.
        self.after_step: Callable[[Recorder], None] | None = None
        #: Kind of the step in progress, set by whoever learns it.
        self.kind: str | None = None
        self._open: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was measured; a step in progress counts from now on, phases that are open stay so."""
        self._step: dict[str, float] = {}
        self.wholes: dict[str, Series] = {}
        self.phases: dict[str, dict[str, Series]] = {}
        self.began = self.ended = self._at = self.clock()

    def begin(self, phase: str) -> None:
        self._charge()
        self._open.append(phase)

    def end(self) -> None:
        self._charge()
        # Empty where a step ended in between, which closes what is open.
        if self._open:
            self._open.pop()

    def finish(self, kind: str) -> None:
        """End the step, which was of this kind; the next begins."""
        self._charge()
        self._open.clear()
        phases = self.phases.setdefault(kind, {})
        for phase, seconds in self._step.items():
            series = phases.get(phase)
            if series is None:
                series = phases[phase] = Series()
            series.add(seconds)
        whole = self.wholes.get(kind)
        if whole is None:
            whole = self.wholes[kind] = Series()
        # Not the sum of the phases: a test compares the two.
        whole.add(self._at - self.ended)
        self.ended = self._at
        self._step = {}
        self.kind = None
        if self.after_step is not None:
            self.after_step(self)

    def _charge(self) -> None:
        now = self.clock()
        phase = self._open[-1] if self._open else OTHER
        self._step[phase] = self._step.get(phase, 0.0) + now - self._at
        self._at = now


def timed(recorder: Recorder, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its time charged to a phase."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.begin(phase)
        try:
            return function(*args, **kwargs)
        finally:
            recorder.end()

    return call


def time_methods(recorder: Recorder, owner: Any, **phases: str) -> None:
    """Replace methods of an object by timed ones: `time_methods(recorder, queue, get="wait")`.

    Raises:
        AttributeError: there is no such method, because upstream renamed it.
    """
    for name, phase in phases.items():
        setattr(owner, name, timed(recorder, phase, getattr(owner, name)))


def time_entering(recorder: Recorder, owner: Any, name: str, phase: str) -> None:
    """Of a method that returns a context manager, charge entering it, which is where it waits."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: _Entering(recorder, phase, method(*args, **kwargs)))


class _Entering:
    def __init__(self, recorder: Recorder, phase: str, inner: AbstractContextManager) -> None:
        self.recorder, self.phase, self.inner = recorder, phase, inner

    def __enter__(self) -> Any:
        self.recorder.begin(self.phase)
        try:
            return self.inner.__enter__()
        finally:
            self.recorder.end()

    def __exit__(self, *raised: Any) -> bool | None:
        return self.inner.__exit__(*raised)


def time_reads(recorder: Recorder, queue: Any, wait: str, read: str) -> None:
    """Time a MessageQueue's reader: waiting for a message, and taking it out of its pickle."""
    if queue._is_local_reader:
        time_entering(recorder, queue, "acquire_read", wait)
        time_methods(recorder, queue, dequeue=read)
    else:
        # Over a socket the two are one call, nearly all of it waiting.
        time_methods(recorder, queue, dequeue=wait)


def time_writes(recorder: Recorder, queue: Any, wait: str, write: str) -> None:
    """Time a MessageQueue's writer: pickling and copying, and waiting for room before that."""
    if queue.n_local_reader:
        time_entering(recorder, queue, "acquire_write", wait)
    time_methods(recorder, queue, enqueue=write)
