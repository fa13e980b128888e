"""Which flavour to build when nobody says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fork.errors import FlavourError
from fork.upstream import Flavour, Upstream

VARIABLE = "VLLM_TARGET_DEVICE"  # upstream's own variable, so that one setting serves both


def choose(upstream: Upstream, asked: str | None = None) -> Flavour:
    name = asked or os.environ.get(VARIABLE) or ("cuda" if driver_present() else "cpu")
    if name not in upstream.flavours:
        origin = "--flavour" if asked else VARIABLE
        raise FlavourError(f"{origin} is {name!r}, and this fork has the flavours {' and '.join(upstream.flavours)}")
    return upstream.flavours[name]


def driver_present(proc: Path = Path("/proc/driver/nvidia")) -> bool:
    """The driver decides, not the toolkit: containers often have the one without the other."""
    return proc.exists() or shutil.which("nvidia-smi") is not None
