# SPDX-License-Identifier: Apache-2.0
"""Row numbers in, stored rows and their scales out: the store over a checkpoint's shards."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from .counters import Counters
from .formats import Kind, Table
from .gather import TableFiles, read_together
from .reads import ReadPool


class Stored(Protocol):
    """What a store says about its table, enough to turn rows into activations."""

    kind: Kind
    table_scale: float
    count: int
    row_bytes: int


class RowStore(ABC):
    """Reads rows on the host.  Two of them: shards of the checkpoint (here), and one flat file (``flat/reader.py``).

    A record is what one row needs, scales included.  ``read`` gives records of sorted, distinct rows; ``split`` takes
    records apart.  They are separate so that rows may be repeated in between, and read ahead.

    Attributes:
        table: what is read
        paths: the files
    """

    table: Stored
    paths: list[Path]

    @abstractmethod
    def read(self, wanted: np.ndarray) -> torch.Tensor:
        """int64, sorted, each once -> uint8 ``[len(wanted), table.row_bytes]``. Raises RowOutOfRange, RowReadFailed."""

    @abstractmethod
    def split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """uint8 ``[..., row_bytes]`` -> ``[..., stored elements]`` and, where rows have scales, ``[..., scales]``."""

    @abstractmethod
    def close(self) -> None:
        """Close the files.  A later ``read`` is an error."""

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read rows in any order.

        Args:
            ids: int64 row numbers on the CPU, of any shape

        Returns:
            ``[*ids.shape, stored elements]``, and ``[*ids.shape, scales]`` where rows have scales of their own

        Raises:
            RowOutOfRange, RowReadFailed
        """
        wanted, where = np.unique(ids.numpy(), return_inverse=True)
        records = self.read(wanted)[torch.from_numpy(where.reshape(-1))]
        return self.split(records.view(*ids.shape, self.table.row_bytes))


class TableReader(RowStore):
    """The open files of a table in shards.

    Attributes:
        table: what is read
    """

    def __init__(
        self, table: Table, pool: ReadPool | None = None, counters: Counters | None = None, pinned: bool = False
    ) -> None:
        """Open every file once for rows, and once for scales of rows.

        Args:
            pinned: as of ``TableFiles``

        Raises:
            UnreadableFile: one cannot be opened
        """
        self.table, self.paths = table, sorted(table.paths)
        pool = pool or ReadPool()
        self._rows = TableFiles(table.rows, pool, counters, pinned)
        self._scales = TableFiles(table.row_scales, pool, counters, pinned) if table.row_scales else None

    def read(self, wanted: np.ndarray) -> torch.Tensor:
        """Records, see ``RowStore``."""
        if self._scales is None:
            return self._rows.read(wanted)
        return torch.cat(read_together((self._rows, self._scales), wanted), dim=1)

    def split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Records taken apart, see ``RowStore``."""
        width, scales = self.table.rows.row_bytes, self.table.row_scales
        rows = records[..., :width].contiguous().view(self.table.rows.dtype)
        return rows, records[..., width:].contiguous().view(scales.dtype) if scales else None

    def close(self) -> None:
        """Close the files.  A later ``read`` is an error."""
        self._rows.close()
        if self._scales:
            self._scales.close()
