# SPDX-License-Identifier: Apache-2.0
"""What the user typed -> a directory on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm.ampere.checkpoint.errors import NoSuchCheckpoint, NotDownloaded

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(checkpoint: str | os.PathLike[str]) -> Path:
    """A directory as it is; a hub id as its newest snapshot in the local cache.

    Raises:
        NoSuchCheckpoint: neither
        NotDownloaded: a hub id without a snapshot here
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise NoSuchCheckpoint(path, "a directory", "a file")
    name = os.fspath(checkpoint)
    if not _HUB_ID.fullmatch(name):
        raise NoSuchCheckpoint(path, "a directory", "nothing")
    folder = _cache() / f"models--{name.replace('/', '--')}"
    snapshots = [entry for entry in (folder / "snapshots").glob("*") if entry.is_dir()]
    try:
        # `main` names the snapshot that a server would use.
        main = folder / "snapshots" / (folder / "refs/main").read_text().strip()
    except OSError:
        main = folder
    if main in snapshots:
        return main
    if snapshots:
        return max(snapshots, key=lambda entry: entry.stat().st_mtime)
    raise NotDownloaded(name, f"a directory, or a snapshot in {folder}", "neither")


def _cache() -> Path:
    """Where huggingface_hub keeps its downloads; the same variables in the same order."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"
