# SPDX-License-Identifier: Apache-2.0
"""Batches of reads by Linux's native asynchronous I/O: ``io_submit``, by number, because libaio is often not there.

For files in the page cache it is not asynchronous, and is not meant to be here: one system call reads hundreds of
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
_DEPTH = 512

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

    def __init__(self) -> None:
        """Raises AioUnavailable."""
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or os.name != "posix":
            raise AioUnavailable(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._local = threading.local()
        self._context()

    def read(self, spans: Spans, target: np.ndarray, nowait: bool) -> np.ndarray:
        """Read every span.

        Args:
            target: uint8, written to; it must not move meanwhile
            nowait: leave out what is not in the page cache

        Returns:
            int64 ``[spans]``: bytes read, or a negated error number; EAGAIN for what was left out
        """
        count, context = len(spans), self._context()
        # All of it at once: what the loop does for each batch it does with the interpreter's lock, for which the engine's
        # own thread waits.
        control = np.zeros(count, dtype=_CONTROL)
        control["data"] = np.arange(count)
        control["rw_flags"] = _RWF_NOWAIT if nowait else 0
        control["fd"], control["offset"], control["bytes"] = spans.fd, spans.offset, spans.size
        control["buffer"] = target.ctypes.data + spans.start
        pointers = control.ctypes.data + np.arange(count, dtype=np.uint64) * _CONTROL.itemsize
        events, answered = np.zeros(count, dtype=_EVENT), 0
        results = np.empty(count, dtype=np.int64)
        for begin in range(0, count, _DEPTH):
            submitted = self._submit_all(context, pointers, begin, min(begin + _DEPTH, count), results)
            self._collect(context, events, answered, answered + submitted)
            answered += submitted
        results[events["data"][:answered].astype(np.int64)] = events["result"][:answered]
        return results

    def _submit_all(
        self, context: ctypes.c_ulong, pointers: np.ndarray, begin: int, end: int, results: np.ndarray
    ) -> int:
        """Submit reads ``[begin, end)``; those that are refused as they stand, such as with a closed descriptor, get
        their result here.  Returns how many others there are."""
        address, at, refused = pointers.ctypes.data, begin, 0
        while at < end:
            taken = _call(self._submit, context, ctypes.c_long(end - at), ctypes.c_void_p(address + 8 * at))
            if taken <= 0:
                results[at] = -(ctypes.get_errno() if taken else errno.EAGAIN)
                taken, refused = 1, refused + 1
            at += taken
        return end - begin - refused

    def _collect(self, context: ctypes.c_ulong, events: np.ndarray, begin: int, end: int) -> None:
        """Wait for as many answers as there are places in ``[begin, end)``."""
        address, done = events.ctypes.data, begin
        while done < end:
            room = ctypes.c_long(end - done)
            at = ctypes.c_void_p(address + done * _EVENT.itemsize)
            got = _call(self._getevents, context, room, room, at, None)
            if got < 0 and ctypes.get_errno() != errno.EINTR:
                raise AioUnavailable(ctypes.get_errno(), "io_getevents: " + os.strerror(ctypes.get_errno()))
            done += max(got, 0)

    def _context(self) -> ctypes.c_ulong:
        """Of this thread, and of this process: a forked one has to make its own."""
        held = getattr(self._local, "held", None)
        if held is None or held.process != os.getpid():
            held = self._local.held = _Context(self._setup, self._destroy)
        return held.number


class _Context:
    def __init__(self, setup: int, destroy: int) -> None:
        self.process, self._destroy = os.getpid(), destroy
        self.number = ctypes.c_ulong(0)
        if _call(setup, ctypes.c_long(_DEPTH), ctypes.byref(self.number)) != 0:
            self.process = -1
            raise AioUnavailable(ctypes.get_errno(), "io_setup: " + os.strerror(ctypes.get_errno()))

    def __del__(self) -> None:
        if self.process == os.getpid():
            _call(self._destroy, self.number)
