# SPDX-License-Identifier: Apache-2.0
"""Every byte of a flat file against its checksums; serving looks at the header and a few rows only."""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..errors import DamagedFlatTable
from .layout import PAGE, SEGMENT_PAGES, FlatTable, read_flat_header


def verify(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> FlatTable:
    """Read the whole file.

    Args:
        progress: told the bytes that are done, and all bytes

    Returns:
        what it says of itself

    Raises:
        DamagedFlatTable: names the segment's offset
        BadFlatHeader, TruncatedFile, UnreadableFile: as ``read_flat_header``
    """
    table = read_flat_header(path)
    with open(path, "rb") as file:
        file.seek(table.data_offset + table.pages * PAGE)
        tail = file.read(4 * table.segments)
        if zlib.crc32(tail) != table.checksum:
            raise DamagedFlatTable(path, f"checksums with CRC {table.checksum:08x}", f"{zlib.crc32(tail):08x}")
        file.seek(table.data_offset)
        for segment, wanted in enumerate(np.frombuffer(tail, dtype="<u4").tolist()):
            pages = min(SEGMENT_PAGES, table.pages - segment * SEGMENT_PAGES)
            found = zlib.crc32(file.read(pages * PAGE))
            if found != wanted:
                at = table.data_offset + segment * SEGMENT_PAGES * PAGE
                raise DamagedFlatTable(path, f"CRC {wanted:08x} of {pages * PAGE} bytes at offset {at}", f"{found:08x}")
            progress((segment * SEGMENT_PAGES + pages) * PAGE, table.size)
    return table
