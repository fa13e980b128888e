# SPDX-License-Identifier: Apache-2.0
"""Reads one by one, with ``preadv``: what every kernel has, and what the others are compared with."""

import errno
import os

import numpy as np

from .spans import Spans

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class PlainQueue:
    """The interface of ``aio.AioQueue``."""

    def prepare(self, spans: Spans, target: np.ndarray, nowait: bool) -> "PlainBatch":
        """As ``AioQueue.prepare``."""
        return PlainBatch(spans, target, nowait)


class PlainBatch:
    """The interface of ``aio.AioBatch``."""

    def __init__(self, spans: Spans, target: np.ndarray, nowait: bool) -> None:
        self._spans, self._view = spans, memoryview(target)
        self._flags = _NOWAIT if nowait else 0
        self._results = np.empty(len(spans), dtype=np.int64)

    def run(self, begin: int, end: int) -> None:
        """As ``AioBatch.run``; raises nothing."""
        part = self._spans[begin:end]
        columns = (part.fd.tolist(), part.offset.tolist(), part.size.tolist(), part.start.tolist())
        for index, (fd, offset, size, start) in enumerate(zip(*columns, strict=True), begin):
            try:
                self._results[index] = os.preadv(fd, [self._view[start : start + size]], offset, self._flags)
            except OSError as error:
                self._results[index] = -(error.errno or errno.EIO)

    def results(self) -> np.ndarray:
        """As ``AioBatch.results``."""
        return self._results
