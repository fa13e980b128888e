"""The base that `fork rebase --onto` names: a version on the index, a wheel, or a checkout."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fork import fetch, pip_download
from fork.base import Base, FolderBase, WheelBase
from fork.errors import DownloadFailed
from fork.progress import say
from fork.upstream import Upstream

_VERSION = re.compile(r"vllm==[\w.!+]+")


@contextmanager
def base(name: str, upstream: Upstream) -> Iterator[Base]:
    if _VERSION.fullmatch(name):
        with _downloaded(name, upstream) as wheel:
            yield WheelBase(wheel)
        return
    path = Path(name)
    if not path.exists():
        raise DownloadFailed(f"--onto {name} is neither vllm==VERSION nor an existing wheel or checkout")
    yield FolderBase(path) if path.is_dir() else WheelBase(path)


@contextmanager
def _downloaded(requirement: str, upstream: Upstream) -> Iterator[Path]:
    """Kept only while it is read: without a hash it must not take the place of a verified wheel."""
    folder = fetch.cache()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"downloading {requirement} without a hash to compare with; upstream.toml knows only the pinned release's")
    work = Path(tempfile.mkdtemp(prefix=".onto-", dir=folder))
    try:
        yield pip_download.download(requirement, upstream.wheels[upstream.bases[0]].file, work, require_hashes=False)
    finally:
        shutil.rmtree(work, ignore_errors=True)
