# SPDX-License-Identifier: Apache-2.0
"""How long the GPU worked on what a stage launched, from events that are read once they have passed.

An event is recorded in the stream before and after a launch.  Nobody waits for one: each new span looks whether the
oldest are over.  A GPU that is waiting for its host shows as `between`: from the end of one forward to the start of
the next, which begins after the activations have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from vllm.v1.stage_times.recorder import Series

FORWARD, BETWEEN = "forward", "between"


def cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class GpuClock:
    """Spans by kind of step and name.

    Args:
        event: makes an event with `record`, `query` and `elapsed_time` in milliseconds
    """

    def __init__(self, event: Callable[[], Any] = cuda_event) -> None:
        self._event = event
        self._open: Any = None
        self._passing: deque[tuple[str, str, Any, Any]] = deque()
        self._last_forward: Any = None
        self.series: dict[str, dict[str, Series]] = {}

    def reset(self) -> None:
        self._passing.clear()
        self._last_forward = None
        self.series = {}

    def begin(self) -> None:
        self.read()
        self._open = self._event()
        self._open.record()

    def end(self, kind: str, name: str) -> None:
        if self._open is None:
            return
        after = self._event()
        after.record()
        self._passing.append((kind, name, self._open, after))
        self._open = None

    def read(self) -> None:
        """Take in what has passed."""
        while self._passing and self._passing[0][3].query():
            kind, name, before, after = self._passing.popleft()
            self._add(kind, name, before.elapsed_time(after))
            if name == FORWARD:
                if self._last_forward is not None:
                    self._add(kind, BETWEEN, self._last_forward.elapsed_time(before))
                self._last_forward = after

    def _add(self, kind: str, name: str, milliseconds: float) -> None:
        self.series.setdefault(kind, {}).setdefault(name, Series()).add(milliseconds / 1e3)
