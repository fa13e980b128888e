"""Which files of a written tree are no longer what the tool wrote."""

from __future__ import annotations

import zlib
from pathlib import Path

from fork.disk import sha256
from fork.manifest import Manifest
from fork.plan import Plan

# Extensions are compared by size alone: reading 400 MB on every `apply` would cost more than applying.
BY_SIZE = (".so",)


def changed(folder: Path, written: Manifest, plan: Plan) -> list[str]:
    package = folder / "vllm"
    found = {path for path in written.touched() if not _ours(package / path, path, written)}
    upstream = plan.members() if _same_wheels(written, plan) else {}
    for path, (_, info) in upstream.items():
        if path not in written.touched() and not _theirs(package / path, info.file_size, info.CRC):
            found.add(path)
    known = written.touched() | upstream.keys()
    for file in package.rglob("*") if upstream else ():
        path = file.relative_to(package).as_posix()
        if path not in known and not file.is_dir() and file.suffix != ".pyc":
            found.add(path)
    return sorted(found)


def _same_wheels(written: Manifest, plan: Plan) -> bool:
    """Files of another release cannot be compared any more, and are replaced as a whole anyway."""
    return written.wheels == plan.manifest(link=True).wheels


def _ours(file: Path, path: str, written: Manifest) -> bool:
    entry = written.edited.get(path) or written.generated.get(path) or written.added[path]
    if "link" in entry:
        return file.is_symlink() and str(file.readlink()) == entry["link"]
    return file.is_file() and not file.is_symlink() and sha256(file.read_bytes()) == entry["after"]


def _theirs(file: Path, size: int, crc: int) -> bool:
    if not file.is_file() or file.stat().st_size != size:
        return False
    return file.suffix in BY_SIZE or zlib.crc32(file.read_bytes()) == crc
