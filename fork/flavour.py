"""Which flavour to build when nobody says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fork import manifest
from fork.errors import FlavourError
from fork.repo import Repo
from fork.upstream import Flavour, Upstream

VARIABLE = "VLLM_TARGET_DEVICE"  # upstream's own variable, so that one setting serves both


def choose(upstream: Upstream, asked: str | None = None) -> Flavour:
    name = asked or os.environ.get(VARIABLE) or ("cuda" if driver_present() else "cpu")
    if name not in upstream.flavours:
        origin = "--flavour" if asked else VARIABLE
        raise FlavourError(f"{origin} is {name!r}, and this fork has the flavours {' and '.join(upstream.flavours)}")
    return upstream.flavours[name]


def written(repo: Repo, folder: Path | None) -> str | None:
    """The flavour of the tree that `apply` is about to renew, unless the environment names one. A CPU tree on a
    machine with a GPU should stay one when only rules changed."""
    if os.environ.get(VARIABLE):
        return None
    places = [folder] if folder else [repo.tree(name) for name in ("cuda", "cpu")]
    manifests = [place / manifest.NAME for place in places if (place / manifest.NAME).is_file()]
    return manifest.read(manifests[0]).flavour if len(manifests) == 1 else None


def driver_present(proc: Path = Path("/proc/driver/nvidia")) -> bool:
    """The driver decides, not the toolkit: containers often have the one without the other."""
    return proc.exists() or shutil.which("nvidia-smi") is not None
