# SPDX-License-Identifier: Apache-2.0
"""Rows and scales from a flat file."""

from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from ..counters import Counters
from ..errors import FlatTableOfOther, MissingShard, TableNotFound, UnfinishedFlatTable, WrongFlatTable
from ..formats import locate_table
from ..gather import TableFiles
from ..locate import TableShape
from ..reader import RowStore, TableReader
from ..reads import ReadPool
from .layout import FlatLocation, FlatTable, read_flat_header

#: Rows that are compared with the checkpoint's when a file is opened: a few milliseconds, and another checkpoint's
#: table of the same geometry differs in all of them.
_COMPARED = 64


class FlatReader(RowStore):
    """The open flat file.

    Attributes:
        table: what is read
        compared: rows that were found to be the checkpoint's when the file was opened as its table
    """

    compared = 0

    def __init__(
        self,
        path: Path,
        table: FlatTable,
        pool: ReadPool | None = None,
        counters: Counters | None = None,
        pinned: bool = False,
    ) -> None:
        """Open the file; ``pinned`` as of ``TableFiles``.  Raises UnreadableFile."""
        self.table, self.paths = table, [path]
        self._files = TableFiles(FlatLocation(path, table), pool, counters, pinned)

    def read(self, wanted: np.ndarray) -> torch.Tensor:
        """Records, see ``RowStore``."""
        return self._files.read(wanted)

    def split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Records taken apart, see ``RowStore``."""
        return split(records, self.table)

    def close(self) -> None:
        self._files.close()


def split(records: torch.Tensor, table: FlatTable) -> tuple[torch.Tensor, torch.Tensor | None]:
    """uint8 ``[..., row_bytes]`` -> stored rows and their scales, in their dtypes."""
    rows = records[..., : table.row.bytes].contiguous().view(table.row.dtype)
    if table.scales is None:
        return rows, None
    return rows, records[..., table.row.bytes :].contiguous().view(table.scales.dtype)


def open_flat(
    path: Path,
    checkpoint: str,
    layer: str,
    shape: TableShape,
    pool: ReadPool | None = None,
    counters: Counters | None = None,
    pinned: bool = False,
) -> FlatReader:
    """Open a flat file as the table of one layer of one checkpoint.

    Args:
        path: as the user gave it
        checkpoint: the model directory; a few rows are compared with its shards, where those are still there
        layer: the checkpoint's name of the layer
        shape: what the config says about its table
        pinned: as of ``TableFiles``

    Raises:
        UnfinishedFlatTable: only its unfinished part is there
        BadFlatHeader, TruncatedFile, UnreadableFile: it is not, or no longer, a whole flat table
        WrongFlatTable: it is the table of another layer, or of another geometry
        FlatTableOfOther: it has other rows than the checkpoint
    """
    if not path.exists() and (rest := partial(path)).exists():
        raise UnfinishedFlatTable(path, "a finished file", f"{rest.name}, which is not")
    table = read_flat_header(path)
    for what, wanted, found in (
        ("layer", layer, table.layer),
        ("rows", shape.rows, table.count),
        ("values per row", shape.dim, table.dim),
    ):
        if wanted != found:
            raise WrongFlatTable(path, f"{what} {wanted}", str(found))
    compared = _compare(path, table, checkpoint, layer, shape)
    reader = FlatReader(path, table, pool, counters, pinned)
    reader.compared = compared
    return reader


def partial(path: Path) -> Path:
    """The name of a file while it is being written."""
    return path.with_name(path.name + ".partial")


def _compare(path: Path, table: FlatTable, checkpoint: str, layer: str, shape: TableShape) -> int:
    """Compare a few rows with the checkpoint's, over files of their own: nothing of it is counted as serving.

    Returns how many; 0 where the checkpoint has no whole table.
    """
    try:
        stored = locate_table(checkpoint, layer, shape)
    except (TableNotFound, MissingShard):
        # The shards, or most of them, may have made room for the file.
        return 0
    wanted = FlatTable.of(stored, layer, shape.dim, {})
    if not wanted.same_table(table):
        raise FlatTableOfOther(path, f"{wanted} rows with scale {wanted.table_scale}, as {checkpoint} has", str(table))
    ids = torch.from_numpy(np.unique(np.linspace(0, shape.rows - 1, _COMPARED).astype(np.int64)))
    with closing(FlatReader(path, table)) as flat, closing(TableReader(stored)) as shards:
        for mine, theirs in zip(flat.gather(ids), shards.gather(ids), strict=True):
            if mine is None:
                continue
            other = (mine.view(torch.uint8) != theirs.view(torch.uint8)).any(-1)
            if other.any():
                row = int(ids[other.nonzero()[0, 0]])
                raise FlatTableOfOther(path, f"row {row} as {checkpoint} has it", "another")
    return len(ids)
