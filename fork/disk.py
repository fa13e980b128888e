"""Room on the disk: asked for before writing, and met again as ENOSPC while writing."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fork.errors import DiskFull, NotWritable

CHUNK = 1 << 20


def free(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def require(folder: Path, what: str, needed: int) -> None:
    if (there := free(folder)) < needed:
        raise DiskFull(folder, what, needed, there)


@contextmanager
def watched(folder: Path, what: str) -> Iterator[None]:
    """What a disk refuses is a sentence too, not a traceback; another process may have taken the room since asking."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(folder, what, None, free(folder)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            place = error.filename or folder
            raise NotWritable(
                f"{what}: {place} cannot be written ({error.strerror}); use a folder of your own"
            ) from error
        raise


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, advance: Callable[[int], object] = lambda _: None) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            total.update(block)
            advance(len(block))
    return total.hexdigest()
