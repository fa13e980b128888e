"""The dist-info folder of our distribution, and the RECORD lines of any file."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from email.message import Message
from pathlib import Path

from packaging.utils import parse_wheel_filename

from fork import requirements
from fork.base import open_wheel
from fork.plan import Sources

NAME = "vllm"
# Replaced by ours. License-File goes with the files of the folder, which are upstream's too.
_OWN_FIELDS = {
    "name",
    "version",
    "requires-dist",
    "provides-extra",
    "description",
    "description-content-type",
    "dynamic",
}


def folder(version: str) -> str:
    return f"{NAME}-{version}.dist-info"


def wheel_name(sources: Sources) -> str:
    return f"{NAME}-{sources.version}-{'-'.join(_tag(sources))}.whl"


def _tag(sources: Sources) -> tuple[str, str, str]:
    """That of the wheel which the extensions come from: they decide where the tree runs."""
    file = sources.upstream.wheels[sources.flavour.compiled_metadata or sources.flavour.metadata].file
    tag = min(parse_wheel_filename(file)[3], key=str)
    return tag.interpreter, tag.abi, tag.platform


def files(sources: Sources, readme: Path) -> dict[str, bytes]:
    """Content by name inside the folder, RECORD excepted."""
    release = sources.wheels[sources.flavour.metadata]
    found = {"METADATA": _metadata(sources, readme), "WHEEL": _wheel(sources)}
    with open_wheel(release) as archive:
        theirs = requirements.dist_info(archive.namelist(), release) + "/"
        for member in archive.namelist():
            name = member.removeprefix(theirs)
            if member.startswith(theirs) and name not in ("METADATA", "WHEEL", "RECORD", ""):
                found[name] = archive.read(member)
    return found


def _metadata(sources: Sources, readme: Path) -> bytes:
    theirs = requirements.read_metadata(sources.wheels[sources.flavour.metadata])
    ours = Message()
    ours["Metadata-Version"] = theirs["Metadata-Version"]
    ours["Name"], ours["Version"] = NAME, sources.version
    for key, value in theirs.items():
        if key.lower() not in _OWN_FIELDS | {"metadata-version"}:
            ours[key] = value
    for line in requirements.derive(sources.flavour, sources.wheels):
        ours["Requires-Dist"] = line
    for name in requirements.extras(sources.flavour, sources.wheels):
        ours["Provides-Extra"] = name
    ours["Description-Content-Type"] = "text/markdown"
    text = readme.read_text("utf-8") if readme.is_file() else ""
    # By hand: email's generator would fold long marker lines and encode the description.
    return ("".join(f"{key}: {value}\n" for key, value in ours.items()) + "\n" + text).encode()


def _wheel(sources: Sources) -> bytes:
    return f"Wheel-Version: 1.0\nGenerator: fork.backend\nRoot-Is-Purelib: false\nTag: {'-'.join(_tag(sources))}\n".encode()


def record_line(path: str, content: bytes) -> tuple[str, str, str]:
    value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return path, f"sha256={value}", str(len(content))


def record_text(lines: list[tuple[str, str, str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode()


def record_lines(text: str) -> list[tuple[str, str, str]]:
    return [(row[0], row[1], row[2]) for row in csv.reader(io.StringIO(text)) if row]
