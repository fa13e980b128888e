# SPDX-License-Identifier: Apache-2.0
"""Batches of reads by Linux's native asynchronous I/O: ``io_submit``, by number, because libaio is often not there.

For files in the page cache it is not asynchronous, and is not meant to be here: one system call reads thousands of
spans one after the other, and the interpreter's lock is free meanwhile.  What is not cached is told apart by
``RWF_NOWAIT``: such a read is not done, and answers EAGAIN.  io_uring would do the same; container runtimes forbid it
by default and allow this.
"""

import ctypes
import errno
import os
import platform
import threading

import numpy as np

from .spans import Spans

#: io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_RWF_NOWAIT = 8
#: Reads of one system call, at most.  After every call a thread waits for the interpreter's lock, and takes it from the
#: engine's own thread: two threads that read a chunk of 32,768 rows from the page cache lost that 11 ms by 512, 2.7 ms by
#: 4,096 (EPYC, 2 cores).
_DEPTH = 4096
#: Of all threads.  A machine has fs.aio-max-nr for all its processes, 65,536 where nobody changed it: enough for two of us.
_RESERVED = 16384

_CONTROL = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),  # 0 is a read
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("object", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_libc = ctypes.CDLL(None, use_errno=True)
_call = _libc.syscall
_call.restype = ctypes.c_long


class AioUnavailable(OSError):
    """The kernel, or what stands between it and us, has no native asynchronous I/O."""


class AioQueue:
    """A queue for each thread that reads; they are given back when their thread or the process ends."""

    def __init__(self, threads: int = 1) -> None:
        """``threads``: that are going to read at once.  Raises AioUnavailable."""
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or os.name != "posix":
            raise AioUnavailable(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
        self.setup, self.destroy, self.getevents, self.submit = numbers
        self._depth = min(_DEPTH, _RESERVED // threads)
        self._local = threading.local()
        self.context()

    def prepare(self, spans: Spans, target: np.ndarray, nowait: bool) -> "AioBatch":
        """Reads of every span.

        Args:
            target: uint8, written to; it must not move meanwhile
            nowait: leave out what is not in the page cache
        """
        return AioBatch(self, spans, target, nowait)

    def context(self) -> "Context":
        """Of this thread, and of this process: a forked one has to make its own. Raises AioUnavailable."""
        held = getattr(self._local, "held", None)
        if held is None or held.process != os.getpid():
            held = self._local.held = Context(self.setup, self.destroy, self._depth)
        return held


class AioBatch:
    """Reads that are prepared, of which each thread does a part.

    Everything is laid out at once: what a part does beside its system calls it does with the interpreter's lock, for which
    the engine's own thread waits.
    """

    def __init__(self, queue: AioQueue, spans: Spans, target: np.ndarray, nowait: bool) -> None:
        count = len(spans)
        self._queue, self._target = queue, target
        self._control = control = np.zeros(count, dtype=_CONTROL)
        control["data"] = np.arange(count)
        control["rw_flags"] = _RWF_NOWAIT if nowait else 0
        control["fd"], control["offset"], control["bytes"] = spans.fd, spans.offset, spans.size
        control["buffer"] = target.ctypes.data + spans.start
        self._pointers = control.ctypes.data + np.arange(count, dtype=np.uint64) * _CONTROL.itemsize
        self._events = np.zeros(count, dtype=_EVENT)
        self._results = np.zeros(count, dtype=np.int64)
        self._submit_from, self._events_from = self._pointers.ctypes.data, self._events.ctypes.data

    def run(self, begin: int, end: int) -> None:
        """Do reads ``[begin, end)``; threads may do others meanwhile. Raises AioUnavailable."""
        context, answered = self._queue.context(), begin
        for first in range(begin, end, context.depth):
            submitted = self._submit(context.number, first, min(first + context.depth, end))
            self._collect(context.number, answered, answered + submitted)
            answered += submitted

    def results(self) -> np.ndarray:
        """When all is done.

        Returns:
            int64 ``[spans]``: bytes read, or a negated error number; EAGAIN for what was left out
        """
        answers = self._events[self._events["object"] != 0]
        self._results[answers["data"].astype(np.int64)] = answers["result"]
        return self._results

    def _submit(self, context: ctypes.c_ulong, begin: int, end: int) -> int:
        """Submit reads ``[begin, end)``; those that are refused as they stand, such as with a closed descriptor, get
        their result here.  Returns how many others there are."""
        at, refused = begin, 0
        while at < end:
            pointers = ctypes.c_void_p(self._submit_from + 8 * at)
            taken = _call(self._queue.submit, context, ctypes.c_long(end - at), pointers)
            if taken <= 0:
                self._results[at] = -(ctypes.get_errno() if taken else errno.EAGAIN)
                taken, refused = 1, refused + 1
            at += taken
        return end - begin - refused

    def _collect(self, context: ctypes.c_ulong, begin: int, end: int) -> None:
        """Wait for as many answers as there are places in ``[begin, end)``."""
        done = begin
        while done < end:
            room = ctypes.c_long(end - done)
            at = ctypes.c_void_p(self._events_from + done * _EVENT.itemsize)
            got = _call(self._queue.getevents, context, room, room, at, None)
            if got < 0 and ctypes.get_errno() != errno.EINTR:
                raise AioUnavailable(ctypes.get_errno(), "io_getevents: " + os.strerror(ctypes.get_errno()))
            done += max(got, 0)


class Context:
    """A queue of the kernel.

    Attributes:
        process: that made it
        number: the kernel's name for it
        depth: reads that it has room for
    """

    def __init__(self, setup: int, destroy: int, depth: int) -> None:
        """``depth``: as many reads, or a quarter or a sixteenth where others have the rest.  Raises AioUnavailable."""
        self.process, self._destroy = os.getpid(), destroy
        self.number = ctypes.c_ulong(0)
        for self.depth in (depth, depth // 4, depth // 16):
            if _call(setup, ctypes.c_long(self.depth), ctypes.byref(self.number)) == 0:
                return
            if ctypes.get_errno() != errno.EAGAIN:
                break
        self.process = -1
        raise AioUnavailable(ctypes.get_errno(), "io_setup: " + os.strerror(ctypes.get_errno()))

    def __del__(self) -> None:
        if self.process == os.getpid():
            _call(self._destroy, self.number)
