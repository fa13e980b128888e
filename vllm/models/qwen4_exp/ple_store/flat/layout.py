# SPDX-License-Identifier: Apache-2.0
"""The file: ``header``, ``pages`` of records, ``checksums``.

    header     8 bytes of magic, u32 length and u32 CRC of the JSON that follows, zeros up to a multiple of 4096
    pages      4096 bytes each: as many whole records as fit, then zeros
    checksums  u32 for each segment of pages, CRC-32; their own CRC is in the header

All numbers are little endian.  A record is a row as the checkpoint stores it, followed by the row's own scales if it has
any.  The file gets its name when it is complete: there is no such thing as half a table under it.
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import BadFlatHeader, TruncatedFile, UnknownRowFormat, UnreadableFile
from ..formats import Kind, Table
from ..header import DTYPES

PAGE = 4096
MAGIC = b"PLEFLAT1"
#: Pages that share a checksum: 64 MiB.
SEGMENT_PAGES = 16384
_MAX_HEADER = 1 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """Stored elements of a record: ``width`` of ``dtype``."""

    dtype: torch.dtype
    width: int

    @property
    def bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class FlatTable:
    """What a flat file holds; the attributes of ``formats.Table`` that readers need, under the same names.

    Attributes:
        layer: the table's layer, ``layers.1.ple…``
        dim: values per row
        row, scales: what a record is made of; ``scales`` None where rows have none of their own
        source: where it is from, for people: the checkpoint's folder name and its files with their sizes
        checksum: CRC-32 of the checksums; None while the file is being written
    """

    layer: str
    count: int
    dim: int
    kind: Kind
    row: Part
    scales: Part | None
    table_scale: float
    source: dict[str, Any]
    checksum: int | None = None

    @classmethod
    def of(cls, table: Table, layer: str, dim: int, source: dict[str, Any]) -> "FlatTable":
        """The description of a file that is to hold ``table``.  Raises UnknownRowFormat for rows beyond a page."""
        rows, scales = table.rows, table.row_scales
        if table.row_bytes > PAGE:
            raise UnknownRowFormat(rows.paths[0], f"at most {PAGE} bytes for a row", f"{table.row_bytes}")
        beside = Part(scales.dtype, scales.dim) if scales else None
        return cls(layer, rows.rows, dim, table.kind, Part(rows.dtype, rows.dim), beside, table.table_scale, source)

    def __str__(self) -> str:
        dtype = str(self.row.dtype).removeprefix("torch.")
        return dtype if self.kind is Kind.PLAIN else f"{dtype} {self.kind.value}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a record."""
        return self.row.bytes + (self.scales.bytes if self.scales else 0)

    @property
    def per_page(self) -> int:
        """Records of a page: 12 for the published rows of 320 bytes, which leaves 6 % of it empty; 25 in FP8."""
        return PAGE // self.row_bytes

    @property
    def pages(self) -> int:
        return -(-self.count // self.per_page)

    @property
    def segments(self) -> int:
        return -(-self.pages // SEGMENT_PAGES)

    @property
    def data_offset(self) -> int:
        """Of the first page.  The space for the header does not depend on the checksum."""
        return -(-(16 + len(self._json(0xFFFFFFFF))) // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Of the whole file."""
        return self.data_offset + self.pages * PAGE + 4 * self.segments

    def same_table(self, other: "FlatTable") -> bool:
        """Whether two descriptions differ at most in where they say the table is from."""
        return self._fields() == other._fields()

    def header(self) -> bytes:
        text = self._json(self.checksum)
        head = MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
        return head.ljust(self.data_offset, b"\0")

    def _fields(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "rows": self.count,
            "dim": self.dim,
            "kind": self.kind.value,
            "row": [_NAMES[self.row.dtype], self.row.width],
            "scales": [_NAMES[self.scales.dtype], self.scales.width] if self.scales else None,
            "table_scale": self.table_scale,
        }

    def _json(self, checksum: int | None) -> bytes:
        text = json.dumps(self._fields() | {"source": self.source, "checksum": checksum})
        # Equal length with every checksum: the header's size must be known before that is.
        return text.encode() + b" " * (10 - len(json.dumps(checksum)))


@dataclass(frozen=True)
class FlatLocation:
    """``gather.Location`` of a flat file."""

    path: Path
    table: FlatTable

    @property
    def paths(self) -> list[Path]:
        return [self.path]

    @property
    def rows(self) -> int:
        return self.table.count

    @property
    def row_bytes(self) -> int:
        return self.table.row_bytes

    def place(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 row numbers -> index of the file, always 0, and byte offset."""
        table = self.table
        page, slot = np.divmod(ids, table.per_page)
        return np.zeros(len(ids), dtype=np.int64), table.data_offset + page * PAGE + slot * table.row_bytes


def read_flat_header(path: Path) -> FlatTable:
    """What a file says it is.

    Raises:
        UnreadableFile: it cannot be opened
        BadFlatHeader: it is no flat table, or its header is damaged
        TruncatedFile: it is shorter than its header says
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(16)
            length = int.from_bytes(start[8:12], "little")
            text = file.read(min(length, _MAX_HEADER))
    except OSError as error:
        raise UnreadableFile(path, "a file written by vllm ampere flatten-ple", error.strerror) from error
    if start[:8] != MAGIC:
        raise BadFlatHeader(path, f"{MAGIC!r} at its beginning", repr(start[:8]))
    if len(text) != length or zlib.crc32(text) != int.from_bytes(start[12:16], "little"):
        raise BadFlatHeader(path, "a header with the checksum it names", "another")
    table = _parse(path, text)
    if size != table.size:
        raise TruncatedFile(path, f"{table.size} bytes", f"{size} bytes")
    return table


def _parse(path: Path, text: bytes) -> FlatTable:
    try:
        read = json.loads(text)
        row, scales = read["row"], read["scales"]
        return FlatTable(
            read["layer"],
            int(read["rows"]),
            int(read["dim"]),
            Kind(read["kind"]),
            Part(DTYPES[row[0]], int(row[1])),
            Part(DTYPES[scales[0]], int(scales[1])) if scales else None,
            float(read["table_scale"]),
            read["source"],
            read["checksum"],
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BadFlatHeader(path, "a header that this version knows", repr(error)) from error
