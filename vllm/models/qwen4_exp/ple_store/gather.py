# SPDX-License-Identifier: Apache-2.0
"""Read rows of a table from its files, by offset.

``ids -> unique, sorted -> runs of neighbours -> advise all, then read all -> scatter``

* Hashes repeat within a batch (a prompt has common pairs of words), so equal ids are
  read once.
* All rows are announced before the first is read, so that the disk sees them at once
  and one thread keeps its queue full.
* The kernel is told that access is random.  Where rows lie close together it would take
  sorted reads for the start of a sequential pass, and read most of the file.

Measured with a cold page cache, 512 tokens (8192 rows of 320 bytes) per run, on a virtual
disk of a busy machine; ``tests/ple_store/cold_reads.py`` repeats it:

    table                       0.2 GB                       2.1 GB
    both advices       62 KiB/token  120-186 ms    68 KiB/token  202-223 ms
    random only        62 KiB/token  631-710 ms    68 KiB/token  533-826 ms
    none              380 KiB/token  148-240 ms    72 KiB/token  594-630 ms

A token's 16 rows lie on 16 pages of 4 KiB, or on a few more where a row crosses a page.
"""

import os
import weakref
from itertools import pairwise

import numpy as np
import torch

from .errors import RowOutOfRange, RowReadFailed, UnreadableFile
from .locate import TableLocation


class TableFiles:
    """The open files of one table.

    Reading is by ``preadv``, which has no file position: threads may share an object,
    and so may the processes of a fork.  The descriptors are closed by ``close``, with
    the last reference, or when the interpreter ends.
    """

    def __init__(self, location: TableLocation) -> None:
        """Open every file once.

        Raises:
            UnreadableFile: one cannot be opened
        """
        self.location = location
        self._starts = np.cumsum([0, *(s.rows for s in location.shards)])
        self._offsets = np.array([s.offset for s in location.shards], dtype=np.int64)
        descriptors: dict[os.PathLike, int] = {}
        self._close = weakref.finalize(self, _close_all, descriptors)
        try:
            for shard in location.shards:
                if shard.path not in descriptors:
                    descriptors[shard.path] = _open(shard.path)
        except UnreadableFile:
            # The traceback keeps this object alive for as long as somebody looks at it.
            self._close()
            raise
        self._descriptors = [descriptors[s.path] for s in location.shards]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Read rows.

        Args:
            ids: int64 row numbers on the CPU, of any shape, in any order

        Returns:
            ``[*ids.shape, dim]`` on the CPU in the dtype of the file.

        Raises:
            RowOutOfRange: an id is negative or beyond the table
            RowReadFailed: the system could not give all bytes of a row
        """
        wanted, where = np.unique(ids.numpy(), return_inverse=True)
        rows = torch.empty(len(wanted), self.location.row_bytes, dtype=torch.uint8)
        if len(wanted):
            self._check(wanted)
            self._read(wanted, rows.numpy())
        # fp8 has no index_select on the CPU, bytes have.
        picked = rows[torch.from_numpy(where.reshape(-1))]
        return picked.view(self.location.dtype).view(*ids.shape, self.location.dim)

    def close(self) -> None:
        """Close the files.  A later ``gather`` is an error."""
        self._close()

    def __enter__(self) -> "TableFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, wanted: np.ndarray) -> None:
        """``wanted``: sorted row numbers, at least one."""
        total = int(self._starts[-1])
        if wanted[0] < 0 or wanted[-1] >= total:
            bad = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise RowOutOfRange(self.location.shards[0].path, f"a row of 0..{total - 1}", f"row {bad}")

    def _read(self, wanted: np.ndarray, rows: np.ndarray) -> None:
        """Fill ``rows`` (uint8 ``[len(wanted), row_bytes]``) with the wanted rows."""
        if not self._close.alive:
            raise RowReadFailed(self.location.shards[0].path, "an open file", "a closed one")
        row_bytes = self.location.row_bytes
        shard = np.searchsorted(self._starts, wanted, side="right") - 1
        offset = self._offsets[shard] + (wanted - self._starts[shard]) * row_bytes
        # Neighbours in one shard are neighbours in its file.
        breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(shard) != 0)) + 1
        bounds = [0, *breaks.tolist(), len(wanted)]
        runs = [(int(shard[a]), int(offset[a]), rows[a:b].reshape(-1)) for a, b in pairwise(bounds)]
        for index, start, target in runs:
            os.posix_fadvise(self._descriptors[index], start, target.size, os.POSIX_FADV_WILLNEED)
        for index, start, target in runs:
            self._read_run(index, start, target)

    def _read_run(self, index: int, offset: int, target: np.ndarray) -> None:
        """Read ``target.size`` bytes from byte ``offset`` of shard ``index``'s file."""
        done = 0
        view = memoryview(target)
        while done < target.size:
            try:
                count = os.preadv(self._descriptors[index], [view[done:]], offset + done)
            except OSError as error:
                actual = error.strerror
                count = 0
            else:
                actual = f"{done} bytes before the end of the file"
            if count == 0:
                raise RowReadFailed(
                    self.location.shards[index].path,
                    f"{target.size} bytes at offset {offset}",
                    actual,
                )
            done += count


def _open(path: os.PathLike) -> int:
    """Open a file for random reads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableFile(path, "a readable file", error.strerror) from error
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _close_all(descriptors: dict[os.PathLike, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
