"""`fork apply DIR`: the forked tree as a folder.

The tree is built beside its place and swapped in by renames, so a reader meets the old one or the new one. Where
an earlier tree of the same wheels exists, untouched files are hard links to it: changed rules then cost the files
they change, not another unpacking of 400 MB of extensions.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fork import disk, drift, manifest
from fork.errors import EditedByHand
from fork.manifest import NAME, Manifest
from fork.plan import Plan
from fork.progress import bar, say


def write(plan: Plan, folder: Path, link: bool, force: bool = False) -> bool:
    """True if anything had to be written."""
    folder = folder.absolute()
    wanted = plan.manifest(link)
    with disk.watched(folder, f"writing {folder}"), _alone(folder.parent):
        earlier = _earlier(folder)
        if earlier is not None:
            changed = drift.changed(folder, earlier, plan)
            if changed and not force:
                raise EditedByHand(folder, changed)
            if not changed and earlier == wanted:
                return False
            if changed or earlier.wheels != wanted.wheels:
                earlier = None  # nothing in there can be trusted to be upstream's
        _build(plan, folder, wanted, earlier)
    return True


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One writer at a time; the parent folder is the lock, so that no lock file is left beside the tree."""
    parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _earlier(folder: Path) -> Manifest | None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    return manifest.read(folder / NAME)


def _build(plan: Plan, folder: Path, wanted: Manifest, earlier: Manifest | None) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        work.chmod(0o755)  # mkdtemp's 0700 would hide an installed tree from other users
        reuse = folder / "vllm" if earlier else None
        _upstream_files(plan, work / "vllm", reuse, (earlier.touched() if earlier else set()) | wanted.touched())
        _own_files(plan, work / "vllm", wanted)
        (work / NAME).write_text(wanted.dump(), encoding="utf-8")
        _swap(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _upstream_files(plan: Plan, target: Path, reuse: Path | None, touched: set[str]) -> None:
    """Files that the earlier or the new series touches come from the wheel; the others from there or from `reuse`."""
    contents = plan.contents()
    unpack = {}
    for path, (archive, info) in plan.members().items():
        if path in contents:
            continue
        if reuse is None or path in touched or not _linked(reuse / path, target / path):
            unpack[path] = (archive, info)
    total = sum(info.file_size for _, info in unpack.values())
    disk.require(target, f"unpacking {plan.upstream.version} ({plan.flavour.name})", total)
    if reuse is None:
        say(f"unpacking {total / (1 << 20):.0f} MiB of upstream's files")
    with bar("unpacking", total) as progress:
        for path, (archive, info) in unpack.items():
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, place.open("wb") as copy:
                shutil.copyfileobj(source, copy, disk.CHUNK)
            place.chmod(0o755 if info.external_attr >> 16 & 0o111 else 0o644)
            progress.update(info.file_size)
    if reuse is not None:
        _keep_bytecode(reuse, target, touched)


def _keep_bytecode(reuse: Path, target: Path, touched: set[str]) -> None:
    """Compiling 3000 files again is the larger part of the first import; not for touched ones, whose size and
    second of change may agree with the old ones, which is all that Python compares."""
    stale = {(str(Path(path).parent), Path(path).stem) for path in touched}
    for cached in reuse.rglob("__pycache__/*.pyc"):
        path = cached.relative_to(reuse)
        if (str(path.parent.parent), path.name.partition(".")[0]) not in stale and (
            target / path.parent.parent
        ).is_dir():
            _linked(cached, target / path)


def _own_files(plan: Plan, target: Path, wanted: Manifest) -> None:
    for path, content in plan.contents().items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    for path, file in plan.outcome.added.items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if "link" in wanted.added[path]:
            place.symlink_to(wanted.added[path]["link"])
        else:
            shutil.copyfile(file, place)


def _linked(source: Path, target: Path) -> bool:
    """A second name for the same bytes; a copy on file systems that have none."""
    if not source.is_file() or source.is_symlink():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return True


def _swap(work: Path, folder: Path) -> None:
    """Two renames; if the second fails, the first is taken back."""
    old = work.with_name(f"{work.name}-old")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(work, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
