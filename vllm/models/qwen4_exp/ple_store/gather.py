# SPDX-License-Identifier: Apache-2.0
"""Read rows of a table from its files, by offset.

``ids -> unique, sorted -> runs of neighbours -> read what is cached, announce and read the rest -> scatter``

* Hashes repeat within a batch (a prompt has common pairs of words), so equal ids are read once.
* A whole batch is handed to the kernel at once (``reads/``).
* The kernel is told that access is random.  It would otherwise read around every row, and where rows lie close
  together take sorted reads for the start of a sequential pass.

A token's 16 rows lie on 16 pages of 4 KiB, or on a few more where a row crosses a page.  What that costs, cold and warm,
is in docs/ampere-multigpu/ngram-table.md, and ``python -m benchmarks.ple_reads`` measures it again.
"""

import errno
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from .counters import Counters
from .errors import LostRow, RowOutOfRange, RowReadFailed, UnreadableFile
from .reads import ReadPool, Spans
from .reads.spans import coalesce, joined

#: What the system says of a file that is lost as a whole: closed, its device or its server gone.
_GONE = (errno.EBADF, errno.ENXIO, errno.ENODEV, errno.ESTALE)


class Location(Protocol):
    """Where the records of a table are: rows of one tensor, or whatever a file of ours holds for each row.

    Attributes:
        paths: its files
        rows: how many there are
        row_bytes: bytes of each record
    """

    paths: list[Path]
    rows: int
    row_bytes: int

    def place(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 row numbers -> index into ``paths`` and byte offset, int64 each."""
        ...


class TableFiles:
    """The open files of one table.

    No file position is used: threads may share an object, and so may the processes of a fork.  The descriptors are
    closed by ``close``, with the last reference, or when the interpreter ends.
    """

    def __init__(
        self,
        location: Location,
        pool: ReadPool | None = None,
        counters: Counters | None = None,
        pinned: bool = False,
    ) -> None:
        """Open every file once.

        Args:
            pinned: what is read goes into pinned memory, which torch keeps for the next time

        Raises:
            UnreadableFile: one cannot be opened
        """
        self.location, self.pinned = location, pinned
        self.pool = pool or ReadPool()
        self.counters = counters or Counters()
        descriptors: list[int] = []
        self._close = weakref.finalize(self, _close_all, descriptors)
        try:
            for path in location.paths:
                descriptors.append(_open(path))
        except UnreadableFile:
            # The traceback keeps this object alive for as long as somebody looks at it.
            self._close()
            raise
        self._descriptors = np.array(descriptors, dtype=np.int64)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Read rows of one tensor.

        Args:
            ids: int64 row numbers on the CPU, of any shape, in any order

        Returns:
            ``[*ids.shape, dim]`` on the CPU in the dtype of the file.

        Raises:
            RowOutOfRange: an id is negative or beyond the table
            RowReadFailed: the system could not give all bytes of a row
        """
        wanted, where = np.unique(ids.numpy(), return_inverse=True)
        # fp8 has no index_select on the CPU, bytes have.
        picked = self.read(wanted)[torch.from_numpy(where.reshape(-1))]
        return picked.view(self.location.dtype).view(*ids.shape, self.location.dim)

    def read(self, wanted: np.ndarray) -> torch.Tensor:
        """Read records.

        Args:
            wanted: int64 row numbers, sorted, each once

        Returns:
            uint8 ``[len(wanted), row_bytes]``

        Raises:
            RowOutOfRange, RowReadFailed
        """
        return read_together([self], wanted)[0]

    def close(self) -> None:
        """Close the files.  A later ``read`` is an error."""
        self._close()

    def __enter__(self) -> "TableFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, wanted: np.ndarray, start: int) -> "Plan":
        """Where ``wanted``, at least one, are; their bytes go to ``start`` of a target. Raises RowOutOfRange, RowReadFailed."""
        count = self.location.rows
        if wanted[0] < 0 or wanted[-1] >= count:
            rows = wanted[(wanted < 0) | (wanted >= count)]
            # Where a row behind the last would be; one below the first has no place.
            lost = self._lost(rows, *self.location.place(np.maximum(rows, 0)), [f"a table of {count} rows"] * len(rows))
            raise RowOutOfRange(lost[0].path, f"a row of 0..{count - 1}", f"row {rows[0]}", lost)
        files, offsets = self.location.place(wanted)
        if not self._close.alive:
            raise RowReadFailed.of(self._lost(wanted, files, offsets, ["a closed file"] * len(wanted)), gone=True)
        spans, first = coalesce(self._descriptors[files], offsets, self.location.row_bytes)
        spans.start[:] += start
        return Plan(spans, first, files, offsets)

    def check(self, wanted: np.ndarray, plan: "Plan", results: np.ndarray) -> None:
        """Raise RowReadFailed, with every row that was not read, unless ``results`` of the plan's spans are complete."""
        failed = np.flatnonzero(results != plan.spans.size)
        if not failed.size:
            return
        lost: list[LostRow] = []
        for span in failed:
            result, size = int(results[span]), self.location.row_bytes
            # Where a file ends, what lies before its end has been read and is whole.
            rows = slice(plan.first[span] + max(result, 0) // size, plan.first[span + 1])
            left = f"{max(result, 0) % size} bytes before the end of the file"
            found = [os.strerror(-result) if result < 0 else left]
            if result >= 0:
                found += ["the end of the file before them"] * (rows.stop - rows.start - 1)
            else:
                found *= rows.stop - rows.start
            lost += self._lost(wanted[rows], plan.files[rows], plan.offsets[rows], found)
        raise RowReadFailed.of(lost, gone=-int(results[failed[0]]) in _GONE)

    def _lost(self, rows: np.ndarray, files: np.ndarray, offsets: np.ndarray, found: list[str]) -> list[LostRow]:
        paths = [str(path) for path in self.location.paths]
        return [
            LostRow(row, paths[file], offset, self.location.row_bytes, what)
            for row, file, offset, what in zip(rows.tolist(), files.tolist(), offsets.tolist(), found, strict=True)
        ]


@dataclass(frozen=True)
class Plan:
    """Reads of some rows.

    Attributes:
        spans: what is read
        first: int64 ``[spans + 1]``, the first row of each span
        files, offsets: int64 ``[rows]``, where each row is
    """

    spans: Spans
    first: np.ndarray
    files: np.ndarray
    offsets: np.ndarray


def read_together(tables: Sequence[TableFiles], wanted: np.ndarray) -> list[torch.Tensor]:
    """The same rows of several tables in one batch, such as rows and their scales, which the disk then sees at once.

    Args:
        tables: the pool, the counters and the kind of memory of the first one are used
        wanted: int64 row numbers, sorted, each once

    Returns:
        uint8 ``[len(wanted), row_bytes]`` for each table

    Raises:
        RowOutOfRange, RowReadFailed
    """
    sizes = [table.location.row_bytes for table in tables]
    bounds = list(accumulate((size * len(wanted) for size in sizes), initial=0))
    # On the host whatever the default device is: models are built under one of CUDA.
    target = torch.empty(bounds[-1], dtype=torch.uint8, device="cpu", pin_memory=tables[0].pinned)
    if len(wanted):
        plans = [table.plan(wanted, start) for table, start in zip(tables, bounds)]
        spans = plans[0].spans if len(plans) == 1 else joined([plan.spans for plan in plans])
        outcome = tables[0].pool.read(spans, target.numpy())
        tables[0].counters.count_reads(spans, outcome)
        ends = list(accumulate((len(plan.spans) for plan in plans), initial=0))
        for table, plan, begin, end in zip(tables, plans, ends, ends[1:]):
            table.check(wanted, plan, outcome.results[begin:end])
    return [target[a:b].view(len(wanted), size) for a, b, size in zip(bounds, bounds[1:], sizes)]


def _open(path: os.PathLike) -> int:
    """Open a file for random reads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableFile(path, "a readable file", error.strerror) from error
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
