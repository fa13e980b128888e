# SPDX-License-Identifier: Apache-2.0
"""Reads one by one, with ``preadv``: what every kernel has, and what the others are compared with."""

import errno
import os

import numpy as np

from .spans import Spans

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class PlainQueue:
    """The interface of ``aio.AioQueue``."""

    def read(self, spans: Spans, target: np.ndarray, nowait: bool) -> np.ndarray:
        """As ``AioQueue.read``."""
        view = memoryview(target)
        flags = _NOWAIT if nowait else 0
        results = np.empty(len(spans), dtype=np.int64)
        columns = (spans.fd.tolist(), spans.offset.tolist(), spans.size.tolist(), spans.start.tolist())
        for index, (fd, offset, size, start) in enumerate(zip(*columns, strict=True)):
            try:
                results[index] = os.preadv(fd, [view[start : start + size]], offset, flags)
            except OSError as error:
                results[index] = -(error.errno or errno.EIO)
        return results
