"""The upstream wheels, in a cache that survives checkouts.

pip does the downloading: it knows the user's index, proxy, certificates and credentials, and an own downloader
would have to learn all of them again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fork import disk, pip_download
from fork.errors import WrongHash
from fork.progress import bar, say
from fork.upstream import Upstream, Wheel


def cache() -> Path:
    if own := os.environ.get("VLLM_FORK_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm-ampere"


def ensure(upstream: Upstream, keys: Iterable[str]) -> dict[str, Path]:
    """Paths of these wheels, downloaded where they are not cached yet, every one of them verified."""
    folder = cache()
    return {key: _ensure(folder, upstream.wheels[key]) for key in keys}


def _ensure(folder: Path, wheel: Wheel) -> Path:
    path = folder / wheel.file
    if not path.exists():
        _download(folder, wheel)
    verify(path, wheel)
    return path


def verify(path: Path, wheel: Wheel) -> None:
    """Compares hashes, once per state of the file: the stamp beside it is void when size or mtime changed."""
    state = {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": wheel.sha256}
    stamp = path.with_name(f"{path.name}.verified")
    try:
        if json.loads(stamp.read_text()) == state:
            return
    except (OSError, ValueError):
        pass
    with bar(f"verifying {path.name}", state["size"]) as progress:
        actual = disk.sha256_file(path, progress.update)
    if actual != wheel.sha256:
        raise WrongHash(path, wheel.sha256, actual)
    try:
        stamp.write_text(json.dumps(state))
    except OSError:
        pass  # a shared, read-only cache, or a full disk: hashing again next time is all that is lost


def _download(folder: Path, wheel: Wheel) -> None:
    """Into a folder of its own inside the cache, then one rename: a name in the cache is always a whole file."""
    what = f"downloading {wheel.file}"
    with disk.watched(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        # Twice: pip writes to its temporary folder and copies from there.
        disk.require(folder, what, 2 * wheel.size)
        work = Path(tempfile.mkdtemp(prefix=".download-", dir=folder))
        try:
            say(f"{what} ({wheel.size / (1 << 20):.0f} MiB) into {folder}")
            requirement = f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}"
            got = pip_download.download(requirement, wheel.file, work, require_hashes=True)
            verify(got, wheel)
            os.replace(got, folder / wheel.file)
            # The stamp holds size and mtime, which a rename keeps.
            os.replace(got.with_name(f"{got.name}.verified"), folder / f"{wheel.file}.verified")
        finally:
            shutil.rmtree(work, ignore_errors=True)
