# SPDX-License-Identifier: Apache-2.0
"""A batch of spans, read in three moves.

What is in the page cache is read first, without waiting.  Then the kernel is told of everything else, so that the
disk sees it at once.  Then that is read.  A large batch is cut over a few threads, each of which does the same; a
system call holds no lock of the interpreter, so they work beside each other and beside the engine's own thread.
"""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .aio import AioQueue, AioUnavailable
from .plain import PlainQueue
from .spans import PAGE, Spans

#: Spans from which another thread pays for being woken: about half a millisecond of reads from the page cache.
_PER_THREAD = 512
_THREADS = 16
#: Answers of a file system that cannot tell whether it would wait.
_DOES_NOT_TELL = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class Outcome:
    """What became of a batch.

    Attributes:
        results: int64 ``[spans]``, bytes read or a negated error number
        cached: bool ``[spans]``, whether it was in the page cache; None where the kernel does not tell
        disk_bytes: of the pages that were not; 0 where the kernel does not tell
    """

    results: np.ndarray
    cached: np.ndarray | None
    disk_bytes: int


class ReadPool:
    """Reads spans, with the best queue that there is.

    Attributes:
        queue: an AioQueue, or a PlainQueue where the kernel has none of those
    """

    def __init__(self, queue: AioQueue | PlainQueue | None = None, threads: int | None = None) -> None:
        """Start no thread before one is needed.

        Args:
            queue: None takes the best
            threads: None: as ``threads_for`` has it
        """
        self.queue = queue if queue is not None else best_queue()
        self._threads = threads or threads_for(len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._tells = True

    def read(self, spans: Spans, target: np.ndarray) -> Outcome:
        """Read every span into ``target`` (uint8); errors are answers, nothing is raised for them."""
        parts = min(self._threads, max(1, len(spans) // _PER_THREAD))
        if parts == 1:
            return self._read(spans, target)
        bounds = np.linspace(0, len(spans), parts + 1).astype(int)
        pieces = [spans[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        done = list(self._executor().map(lambda piece: self._read(piece, target), pieces))
        told = all(part.cached is not None for part in done)
        return Outcome(
            np.concatenate([part.results for part in done]),
            np.concatenate([part.cached for part in done]) if told else None,
            sum(part.disk_bytes for part in done),
        )

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None

    def _read(self, spans: Spans, target: np.ndarray) -> Outcome:
        try:
            return self._in_moves(spans, target)
        except AioUnavailable:
            # The kernel has no room for the queue of one more thread (fs.aio-max-nr).
            self.queue = PlainQueue()
            return self._in_moves(spans, target)

    def _in_moves(self, spans: Spans, target: np.ndarray) -> Outcome:
        if not self._tells:
            advise(spans)
            return Outcome(complete(self.queue, spans, target), None, 0)
        results = self.queue.read(spans, target, nowait=True)
        cached = results == spans.size
        if cached.all():
            return Outcome(results, cached, 0)
        if np.isin(-results, _DOES_NOT_TELL).any():
            self._tells = False
            return self._in_moves(spans, target)
        rest = spans[~cached]
        advise(rest)
        results[~cached] = complete(self.queue, rest, target)
        return Outcome(results, cached, _pages(rest) * PAGE)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._process != os.getpid():
                # Threads do not survive a fork.
                self._process = os.getpid()
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ngram-rows")
            return self._pool


def threads_for(processors: int) -> int:
    """How many threads read a large batch, by the processors that this process may use: half of them, up to sixteen.

    All of them where there are no more than four.  Where a read is expensive, reading a chunk of a long prompt (32,768
    rows) must take less than computing it: on the 16 processors of a sandboxed H200's host it took 240 ms with one
    thread, 80 with four, 40 with eight and 30 with sixteen, and the engine needs some of them.
    """
    return min(_THREADS, max(min(processors, 4), processors // 2))


def best_queue() -> AioQueue | PlainQueue:
    try:
        return AioQueue()
    except AioUnavailable:
        return PlainQueue()


def advise(spans: Spans) -> None:
    """Tell the kernel of all of them, so that the disk can work on all at once."""
    for fd, offset, size in zip(spans.fd.tolist(), spans.offset.tolist(), spans.size.tolist(), strict=True):
        try:
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            # Advice can be refused; reading then says what is wrong.
            return


def complete(queue: AioQueue | PlainQueue, spans: Spans, target: np.ndarray) -> np.ndarray:
    """Read, and go on where a read gave less than asked for, until the end of the file or an error."""
    results = queue.read(spans, target, nowait=False)
    while (short := np.flatnonzero((results > 0) & (results < spans.size))).size:
        got = results[short]
        rest = spans[short]
        more = queue.read(Spans(rest.fd, rest.offset + got, rest.size - got, rest.start + got), target, nowait=False)
        results[short] = np.where(more > 0, got + more, np.where(more < 0, more, got))
        if (more <= 0).all():
            break
    return results


def _pages(spans: Spans) -> int:
    """Pages that the spans touch, each counted once; spans are in the order of files and offsets."""
    first, last = spans.offset // PAGE, (spans.offset + spans.size - 1) // PAGE
    shared = (first[1:] == last[:-1]) & (spans.fd[1:] == spans.fd[:-1])
    return int((last - first + 1).sum() - shared.sum())
