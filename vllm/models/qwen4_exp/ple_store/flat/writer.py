# SPDX-License-Identifier: Apache-2.0
"""Write a flat file from a checkpoint's shards.

Segment by segment into ``FILE.partial``, each on the disk before its checksum goes into ``FILE.progress``; so a run that
was stopped, by a full disk or a power cut, goes on behind the last segment that was noted.  The header is written last,
and the rename that gives the file its name comes after everything else.
"""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import (
    DamagedFlatTable,
    FlatTableNotWritten,
    NoRoomForFlatTable,
    RowReadFailed,
    UnreadableFile,
    WrongFlatTable,
)
from ..formats import Table
from ..locate import TableLocation
from .layout import PAGE, SEGMENT_PAGES, FlatTable, read_flat_header
from .reader import partial


def flatten(
    table: Table,
    layer: str,
    dim: int,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FlatTable:
    """Write ``table`` to ``out``, or go on with it.

    Args:
        table: where the rows are
        layer: the table's layer in the checkpoint
        dim: values per row
        progress: told the bytes that are done, and all bytes; first with what an earlier run has done

    Returns:
        what the file says of itself

    Raises:
        WrongFlatTable: there is a file of that name, finished or not, for another table
        NoRoomForFlatTable: the disk is too full, or became so
        FlatTableNotWritten: the disk or its permissions forbid it
        UnreadableFile, RowReadFailed: the checkpoint cannot be read
    """
    try:
        return _flatten(FlatTable.of(table, layer, dim, _source(table)), table, out, progress)
    except OSError as error:
        kind = NoRoomForFlatTable if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else FlatTableNotWritten
        raise kind(out, "to be written", error.strerror) from error


def _flatten(made: FlatTable, table: Table, out: Path, progress: Callable[[int, int], None]) -> FlatTable:
    if out.exists():
        found = read_flat_header(out)
        if not found.same_table(made) or found.source["files"] != made.source["files"]:
            raise WrongFlatTable(out, f"no file, or one of {made.source['checkpoint']}", _what(found))
        progress(found.size, found.size)
        return found
    journal = Journal(out, made)
    checksums = journal.resume()
    _check_room(out, made)
    progress(_bytes_of(made, len(checksums)), made.size)
    with open(partial(out), "r+b" if checksums else "wb") as file:
        for segment in range(len(checksums), made.segments):
            pages = segment_pages(table, made, segment)
            file.seek(made.data_offset + segment * SEGMENT_PAGES * PAGE)
            file.write(pages)
            _settle(file)
            checksums.append(zlib.crc32(pages))
            journal.note(checksums[-1])
            progress(_bytes_of(made, len(checksums)), made.size)
        made = _finish(file, made, checksums)
    os.replace(partial(out), out)
    journal.drop()
    _sync_folder(out.parent)
    progress(made.size, made.size)
    return made


class Journal:
    """Checksums of the segments that are on the disk; its first line says of which table."""

    def __init__(self, out: Path, table: FlatTable) -> None:
        self.path = out.with_name(out.name + ".progress")
        self._partial, self._table = partial(out), table
        self._head = json.dumps([table.layer, str(table), table.size, table.table_scale, table.source])

    def resume(self) -> list[int]:
        """The checksums of an earlier run; the last one is compared with what is there.

        Raises:
            WrongFlatTable: that run was for another table
        """
        if not self.path.exists() or not self._partial.exists():
            self._begin([])
            return []
        head, *lines = self.path.read_text().splitlines()
        if head != self._head:
            raise WrongFlatTable(self.path, f"the progress of {self._head}", head)
        # A line may have been cut by whatever ended that run.
        checksums = [int(line[:8], 16) for line in lines if len(line) == 9 and line.endswith(".")]
        with open(self._partial, "rb") as file:
            while checksums and zlib.crc32(self._read(file, len(checksums) - 1)) != checksums[-1]:
                checksums.pop()
        self._begin(checksums)
        return checksums

    def note(self, checksum: int) -> None:
        with open(self.path, "a") as file:
            file.write(f"{checksum:08x}.\n")
            file.flush()
            os.fdatasync(file.fileno())

    def drop(self) -> None:
        self.path.unlink()

    def _begin(self, checksums: list[int]) -> None:
        self.path.write_text("".join([self._head + "\n", *(f"{one:08x}.\n" for one in checksums)]))

    def _read(self, file, segment: int) -> bytes:
        file.seek(self._table.data_offset + segment * SEGMENT_PAGES * PAGE)
        return file.read(_pages_of(self._table, segment) * PAGE)


def segment_pages(table: Table, made: FlatTable, segment: int) -> bytes:
    """The pages of one segment, from the shards."""
    pages, first = _pages_of(made, segment), segment * SEGMENT_PAGES * made.per_page
    count = min(pages * made.per_page, made.count - first)
    records = np.zeros((pages * made.per_page, made.row_bytes), dtype=np.uint8)
    records[:count, : made.row.bytes] = _rows(table.rows, first, count)
    if table.row_scales is not None:
        records[:count, made.row.bytes :] = _rows(table.row_scales, first, count)
    filled = np.zeros((pages, PAGE), dtype=np.uint8)
    filled[:, : made.per_page * made.row_bytes] = records.reshape(pages, -1)
    return filled.tobytes()


def _rows(location: TableLocation, first: int, count: int) -> np.ndarray:
    """Consecutive rows, uint8 ``[count, row_bytes]``."""
    rows = np.empty((count, location.row_bytes), dtype=np.uint8)
    begin = 0
    for shard in location.shards:
        here, there = max(first, begin), min(first + count, begin + shard.rows)
        if here < there:
            target = memoryview(rows[here - first : there - first].reshape(-1))
            _read(shard.path, shard.offset + (here - begin) * location.row_bytes, target)
        begin += shard.rows
    return rows


def _read(path: Path, offset: int, target: memoryview) -> None:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(target) and (count := file.readinto(target[done:])):
                done += count
            # It will not be read again, and other things are in the page cache for a reason.
            os.posix_fadvise(file.fileno(), offset, len(target), os.POSIX_FADV_DONTNEED)
    except FileNotFoundError as error:
        raise UnreadableFile(path, "a readable file", error.strerror) from error
    except OSError as error:
        raise RowReadFailed(path, f"{len(target)} bytes at offset {offset}", error.strerror) from error
    if done < len(target):
        raise RowReadFailed(path, f"{len(target)} bytes at offset {offset}", f"{done} bytes")


def _finish(file, made: FlatTable, checksums: list[int]) -> FlatTable:
    """Write checksums and header."""
    tail = np.array(checksums, dtype="<u4").tobytes()
    made = replace(made, checksum=zlib.crc32(tail))
    file.seek(made.data_offset + made.pages * PAGE)
    file.write(tail)
    file.seek(0)
    file.write(made.header())
    file.flush()
    os.fsync(file.fileno())
    if os.fstat(file.fileno()).st_size != made.size:
        raise DamagedFlatTable(file.name, f"{made.size} bytes", f"{os.fstat(file.fileno()).st_size}")
    return made


def _check_room(out: Path, made: FlatTable) -> None:
    """Raises NoRoomForFlatTable before anything is written, rather than an hour later."""
    rest = partial(out)
    written = rest.stat().st_blocks * 512 if rest.exists() else 0
    needed, free = made.size - written, shutil.disk_usage(out.parent).free
    if needed > free:
        raise NoRoomForFlatTable(out, f"{needed / 2**30:.1f} GiB free in {out.parent}", f"{free / 2**30:.1f} GiB")


def _source(table: Table) -> dict:
    paths = sorted(table.paths)
    return {"checkpoint": paths[0].parent.name, "files": [[path.name, path.stat().st_size] for path in paths]}


def _what(table: FlatTable) -> str:
    return (
        f"{table.count} rows of {table.dim} values, {table}, of layer {table.layer} of {table.source.get('checkpoint')}"
    )


def _pages_of(table: FlatTable, segment: int) -> int:
    return min(SEGMENT_PAGES, table.pages - segment * SEGMENT_PAGES)


def _bytes_of(table: FlatTable, segments: int) -> int:
    return min(segments * SEGMENT_PAGES, table.pages) * PAGE


def _settle(file) -> None:
    """On the disk, and out of the page cache, which it would fill with a table that nobody reads yet."""
    file.flush()
    os.fdatasync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
