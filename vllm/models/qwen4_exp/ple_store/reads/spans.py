# SPDX-License-Identifier: Apache-2.0
"""A batch of reads as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: What the kernel reads from a disk at the least.
PAGE = 4096


@dataclass(frozen=True)
class Spans:
    """Bytes to read; all arrays have one element for each span.

    Attributes:
        fd: int64, open descriptors
        offset: int64, first byte in the file
        size: int64, bytes
        start: int64, where in the target they go
    """

    fd: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    start: np.ndarray

    def __len__(self) -> int:
        return len(self.fd)

    def __getitem__(self, picked: np.ndarray | slice) -> "Spans":
        return Spans(self.fd[picked], self.offset[picked], self.size[picked], self.start[picked])

    @property
    def pages(self) -> np.ndarray:
        """Pages of 4 KiB that each span touches; neighbours may share one."""
        return (self.offset + self.size - 1) // PAGE - self.offset // PAGE + 1


def coalesce(fd: np.ndarray, offset: np.ndarray, record: int) -> tuple[Spans, np.ndarray]:
    """Records of equal size, in the order of their place in the target, joined where they follow each other on disk.

    Args:
        fd, offset: int64 ``[records]``, where each record is
        record: bytes of each

    Returns:
        the spans, and int64 ``[spans + 1]``: the first record of each span, closed by the number of records
    """
    broken = np.flatnonzero((np.diff(offset) != record) | (np.diff(fd) != 0)) + 1
    first = np.concatenate(([0], broken, [len(fd)])) if len(fd) else np.zeros(1, dtype=np.int64)
    lead = first[:-1]
    return Spans(fd[lead], offset[lead], np.diff(first) * record, lead * record), first


def joined(parts: Sequence[Spans]) -> Spans:
    """One batch of several."""
    return Spans(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("fd", "offset", "size", "start"))
    )
