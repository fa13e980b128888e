# SPDX-License-Identifier: Apache-2.0
"""A batch of spans, read in three moves.

What is in the page cache is read first, without waiting.  Then the kernel is told of everything else, so that the
disk sees it at once.  Then that is read.  Each move of a large batch is cut over a few threads; a system call holds no
lock of the interpreter, so they work beside each other and beside the engine's own thread.
"""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise

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
        self._threads = threads or threads_for(len(os.sched_getaffinity(0)))
        self.queue = queue if queue is not None else best_queue(self._threads)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._tells = True

    def read(self, spans: Spans, target: np.ndarray) -> Outcome:
        """Read every span into ``target`` (uint8); errors are answers, nothing is raised for them."""
        try:
            return self._in_moves(spans, target)
        except AioUnavailable:
            # The kernel has no room for the queue of one more thread (fs.aio-max-nr).
            self.queue = PlainQueue()
            return self._in_moves(spans, target)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None

    def _in_moves(self, spans: Spans, target: np.ndarray) -> Outcome:
        if self._tells:
            results = self._run(spans, target, nowait=True)
            cached = results == spans.size
            if cached.all():
                return Outcome(results, cached, 0)
            if not np.isin(-results, _DOES_NOT_TELL).any():
                rest = spans[~cached]
                results[~cached] = self._complete(rest, target)
                return Outcome(results, cached, _pages(rest) * PAGE)
            self._tells = False
        return Outcome(self._complete(spans, target), None, 0)

    def _complete(self, spans: Spans, target: np.ndarray) -> np.ndarray:
        """Read, and go on where a read gave less than asked for, until the end of the file or an error."""
        self._spread(len(spans), lambda begin, end: advise(spans[begin:end]))
        results = self._run(spans, target, nowait=False)
        while (short := np.flatnonzero((results > 0) & (results < spans.size))).size:
            got = results[short]
            rest = spans[short]
            more = self._run(Spans(rest.fd, rest.offset + got, rest.size - got, rest.start + got), target, nowait=False)
            results[short] = np.where(more > 0, got + more, np.where(more < 0, more, got))
            if (more <= 0).all():
                break
        return results

    def _run(self, spans: Spans, target: np.ndarray, nowait: bool) -> np.ndarray:
        batch = self.queue.prepare(spans, target, nowait)
        self._spread(len(spans), batch.run)
        return batch.results()

    def _spread(self, count: int, work: Callable[[int, int], None]) -> None:
        """Do ``work`` on ``[0, count)``, in parts beside each other where it is large."""
        parts = min(self._threads, max(1, count // _PER_THREAD))
        if parts == 1:
            work(0, count)
            return
        bounds = [count * part // parts for part in range(parts + 1)]
        # What a part raises is raised here, when all have ended: the target is theirs until then.
        parts_done = [self._executor().submit(work, begin, end) for begin, end in pairwise(bounds)]
        wait(parts_done)
        for part in parts_done:
            part.result()

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


def best_queue(threads: int) -> AioQueue | PlainQueue:
    try:
        return AioQueue(threads)
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


def _pages(spans: Spans) -> int:
    """Pages that the spans touch, each counted once; spans are in the order of files and offsets."""
    first, last = spans.offset // PAGE, (spans.offset + spans.size - 1) // PAGE
    shared = (first[1:] == last[:-1]) & (spans.fd[1:] == spans.fd[:-1])
    return int((last - first + 1).sum() - shared.sum())
