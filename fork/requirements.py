"""What our distribution depends on: upstream's own words, not a list of ours that would age beside them."""

from __future__ import annotations

import email
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fork.base import open_wheel
from fork.errors import BadWheel, UndecidedRequirement, listed
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
    another device, and often from an earlier release: what both require is kept in the release's words, what only
    the other requires is for the device, and for the rest upstream.toml has to say whether it is new or for the
    release's own device. Extras follow the compiled side, whose torch they were pinned for.
    """
    release = _lines(wheels[flavour.metadata])
    if flavour.compiled_metadata is None:
        return release
    compiled = _lines(wheels[flavour.compiled_metadata])
    outright = [line for line in release if not _extra(line)]
    device = [line for line in compiled if not _extra(line)]
    known, shared = {_name(line) for line in outright}, {_name(line) for line in device}
    wanted = shared | {canonicalize_name(name) for name in flavour.adds}
    left_out = {_name(line) for line in flavour.pins} | {canonicalize_name(name) for name in flavour.drop}
    if undecided := sorted(known - wanted - left_out):
        raise UndecidedRequirement(
            f"{wheels[flavour.metadata].name} requires {listed(undecided)}, which "
            f"{wheels[flavour.compiled_metadata].name} does not; name each in `adds` or `drop` of "
            f"[flavours.{flavour.name}] in upstream.toml"
        )
    lines = [line for line in outright if _name(line) in wanted]
    lines += [line for line in device if _name(line) not in known]
    kept = [line for line in lines if _name(line) not in left_out]
    return [*kept, *flavour.pins, *(line for line in compiled if _extra(line))]


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
