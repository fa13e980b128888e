"""What our distribution depends on: upstream's own words, not a list of ours that would age beside them."""

from __future__ import annotations

import email
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fork.base import open_wheel
from fork.errors import BadWheel
from fork.upstream import Flavour


def read_metadata(wheel: Path) -> Message:
    with open_wheel(wheel) as archive:
        return email.message_from_bytes(archive.read(dist_info(archive.namelist(), wheel) + "/METADATA"))


def dist_info(members: list[str], wheel: Path) -> str:
    for name in members:
        folder, _, file = name.partition("/")
        if folder.endswith(".dist-info") and file == "METADATA":
            return folder
    raise BadWheel(f"{wheel} has no METADATA")


def derive(flavour: Flavour, wheels: dict[str, Path]) -> list[str]:
    """Requires-Dist lines of the flavour.

    Without `compiled_metadata` they are the release's own. With it, the extensions come from another project for
    another device: what that device does not need is known by the other project not naming it, and what only it
    needs is taken from there. Extras follow the compiled side, whose torch they were pinned for.
    """
    release = _lines(wheels[flavour.metadata])
    if flavour.compiled_metadata is None:
        return release
    compiled = _lines(wheels[flavour.compiled_metadata])
    # Optional there, as in an extra, is not needed there.
    shared = {_name(line) for line in compiled if not _extra(line)}
    pinned = {_name(line) for line in flavour.pins}
    known = {_name(line) for line in release}
    left_out = pinned | {canonicalize_name(name) for name in flavour.drop}
    kept = [line for line in release if _name(line) in shared and not _extra(line)]
    only_compiled = [line for line in compiled if _name(line) not in known and not _extra(line)]
    lines = [line for line in kept + only_compiled if _name(line) not in left_out]
    return [*lines, *flavour.pins, *(line for line in compiled if _extra(line))]


def extras(flavour: Flavour, wheels: dict[str, Path]) -> list[str]:
    return read_metadata(wheels[flavour.compiled_metadata or flavour.metadata]).get_all("Provides-Extra", [])


def _lines(wheel: Path) -> list[str]:
    return read_metadata(wheel).get_all("Requires-Dist", [])


def _name(line: str) -> str:
    return canonicalize_name(Requirement(line).name)


def _extra(line: str) -> bool:
    """Upstream puts several projects in an extra that it also requires outright, so the marker decides."""
    marker = Requirement(line).marker
    return marker is not None and "extra" in str(marker)
