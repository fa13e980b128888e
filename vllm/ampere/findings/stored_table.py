# SPDX-License-Identifier: Apache-2.0
"""The n-gram table as the store that serves its rows would open it: from the checkpoint's shards, or from a flat file.

Here the store's own functions judge, so that `vllm ampere check` and a server say the same in the same words. They
import torch, which is why nothing else here asks them: headers that `read` has parsed say enough of shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.finding import REFUSE, Finding
from vllm.ampere.findings import ngram_table

_IN_THE_FLAT_FILE = (ngram_table.NgramTableMissing, ngram_table.NgramShardMissing)


class TableRefused(Finding):
    """What a store says; its own sentence and way out stand in place of these."""

    what = "The n-gram table cannot be read"


@dataclass(frozen=True)
class StoredTable:
    """One layer's table, opened and closed again.

    Attributes:
        layer: counted from zero
        form: what a row is made of, "bfloat16"
        row_bytes: of a row with its own scales
        bytes: of all rows; of a flat file, its size
        flat: the flat file; None for shards
        compared: rows of the flat file that are those of the checkpoint; 0 where the checkpoint has none
    """

    layer: int
    rows: int
    form: str
    row_bytes: int
    bytes: int
    flat: Path | None = None
    compared: int = 0

    def __str__(self) -> str:
        said = f"n-gram table of layer {self.layer}: {self.rows} rows, {self.form}"
        if self.flat is None:
            return said
        compared = f"{self.compared} of them compared with the checkpoint's" if self.compared else "not compared"
        return f"{said}, in {self.flat}, {compared}"

    def json(self) -> dict[str, Any]:
        """Of a flat file."""
        return {
            "file": str(self.flat),
            "layer": self.layer,
            "rows": self.rows,
            "row_format": self.form,
            "row_bytes": self.row_bytes,
            "bytes": self.bytes,
            "rows_compared": self.compared,
        }


def stored_tables(checkpoint: Checkpoint, flat: Path | None) -> Iterator[StoredTable | TableRefused]:
    """What the store that serves the rows makes of each table of the config.

    Args:
        flat: the flat file that rows are to be read from; None for the checkpoint's shards
    """
    from vllm.models.qwen4_exp.ple_store.errors import PLEStoreError
    from vllm.models.qwen4_exp.ple_store.flat.reader import open_flat
    from vllm.models.qwen4_exp.ple_store.formats import locate_table
    from vllm.models.qwen4_exp.ple_store.locate import tables_of

    for layer, name, shape in tables_of(checkpoint.text):
        try:
            if flat is None:
                table = locate_table(checkpoint.path, name, shape)
                yield StoredTable(layer, table.count, str(table), table.row_bytes, table.count * table.row_bytes)
                continue
            store = open_flat(flat, str(checkpoint.path), name, shape)
        except PLEStoreError as error:
            refused = TableRefused(Path(error.path).name, error.expected, error.actual)
            refused.what, refused.remedy = error.what, error.remedy
            yield refused
        else:
            store.close()
            table = store.table
            yield StoredTable(layer, table.count, str(table), table.row_bytes, table.size, flat, store.compared)


def without_room_made(found: list[Finding]) -> list[Finding]:
    """Findings where rows come from a flat file: shards that the index does not name any more made room for it.

    A name without its file stays one: it stops the loader.
    """
    return [finding for finding in found if not isinstance(finding, _IN_THE_FLAT_FILE)]


def with_flat_file(
    checkpoint: Checkpoint, found: list[Finding], flat: Path
) -> tuple[list[Finding], StoredTable | None]:
    """A checkpoint's findings, and its table, where rows are read from `flat`; refusals stay first.

    The file is not asked for what the config or the shards have said of the table already, and what it says of the
    shards counts only where nothing else was refused: the same damage would be there twice.
    """
    found = without_room_made(found)
    if any(type(finding).__module__ == ngram_table.__name__ for finding in found):
        return found, None
    refused = any(finding.severity == REFUSE for finding in found)
    asked = list(stored_tables(checkpoint, flat))
    said = [one for one in asked if isinstance(one, TableRefused) and (one.where == flat.name or not refused)]
    opened = next((one for one in asked if isinstance(one, StoredTable)), None)
    return [*said, *found], opened
