"""Replaces, creates and deletes a set of files: all of them, or none."""

from __future__ import annotations

import os
from pathlib import Path

from fork import disk

SUFFIX = ".fork-part"


def commit(root: Path, changes: dict[str, bytes | None]) -> None:
    """`changes` maps paths below root to new content, None deletes. Applied in the order given.

    Everything is written beside its place first, where a full disk or a read-only folder does no harm; what
    follows are renames. A rename also leaves hard links to the old file (some installers share their cache that
    way) as they were.
    """
    made: list[Path] = []
    try:
        with disk.watched(root, f"writing {len(changes)} files"):
            for path, content in changes.items():
                if content is not None:
                    _stage(root / path, content, made)
            _replace(root, changes, made)
    finally:
        for path in changes:
            _part(root / path).unlink(missing_ok=True)
        # Deepest first. Folders in use stay, since rmdir refuses them.
        for folder in sorted({*made, *_parents(root, changes)}, key=lambda f: -len(f.parts)):
            _drop_if_empty(folder)


def _stage(place: Path, content: bytes, made: list[Path]) -> None:
    missing = [folder for folder in place.parents if not folder.exists()]
    made += missing
    place.parent.mkdir(parents=True, exist_ok=True)
    part = _part(place)
    part.write_bytes(content)
    part.chmod(place.stat().st_mode & 0o777 if place.exists() else 0o644)


def _replace(root: Path, changes: dict[str, bytes | None], made: list[Path]) -> None:
    before: dict[Path, bytes | None] = {}
    try:
        for path, content in changes.items():
            place = root / path
            before[place] = place.read_bytes() if place.exists() else None
            if content is None:
                place.unlink(missing_ok=True)
            else:
                os.replace(_part(place), place)
            _drop_bytecode(place)
    except BaseException:
        for place, content in before.items():
            _restore(place, content, made)
        raise


def _restore(place: Path, content: bytes | None, made: list[Path]) -> None:
    if content is None:
        place.unlink(missing_ok=True)
    elif not place.exists() or place.read_bytes() != content:
        _stage(place, content, made)
        _part(place).replace(place)


def _part(place: Path) -> Path:
    return place.with_name(place.name + SUFFIX)


def _drop_bytecode(place: Path) -> None:
    """Python compares only size and second of change, and both can agree between our text and upstream's."""
    for cached in place.parent.glob(f"__pycache__/{place.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _parents(root: Path, changes: dict[str, bytes | None]) -> set[Path]:
    gone = (root / path for path, content in changes.items() if content is None)
    return {folder for place in gone for folder in place.parents if folder.is_relative_to(root) and folder != root}


def _drop_if_empty(folder: Path) -> None:
    for place in (folder / "__pycache__", folder):
        try:
            place.rmdir()
        except OSError:
            pass
