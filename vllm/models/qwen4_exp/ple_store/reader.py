# SPDX-License-Identifier: Apache-2.0
"""Row numbers in, stored rows and their scales out."""

import torch

from .formats import Table
from .gather import TableFiles


class TableReader:
    """The open files of a table.

    Attributes:
        table: what is read
    """

    def __init__(self, table: Table) -> None:
        """Open every file once for rows, and once for scales of rows.

        Raises:
            UnreadableFile: one cannot be opened
        """
        self.table = table
        self._rows = TableFiles(table.rows)
        self._scales = TableFiles(table.row_scales) if table.row_scales else None

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read rows.

        Args:
            ids: int64 row numbers on the CPU, of any shape, in any order

        Returns:
            ``[*ids.shape, stored elements]``, and ``[*ids.shape, scales]`` where rows
            have scales of their own

        Raises:
            RowOutOfRange, RowReadFailed
        """
        return self._rows.gather(ids), self._scales.gather(ids) if self._scales else None

    def close(self) -> None:
        """Close the files.  A later ``gather`` is an error."""
        self._rows.close()
        if self._scales:
            self._scales.close()
