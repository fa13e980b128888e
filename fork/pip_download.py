"""`pip download` of one wheel, its complaints turned into our errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename

from fork import disk
from fork.errors import DiskFull, DownloadFailed, WrongHash

_HASHES = re.compile(r"Expected sha256 (?P<expected>[0-9a-f]{64}).*?Got\s+(?P<actual>[0-9a-f]{64})", re.DOTALL)
_NO_ROOM = re.compile(r"No space left on device|Errno 28|Disk quota exceeded")
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Max retries exceeded|ConnectTimeout|Network is unreachable|"
    r"ProxyError|SSLError|connection broken|Read timed out|ReadTimeoutError"
)


def download(requirement: str, file: str | None, work: Path, require_hashes: bool) -> Path:
    """The wheel that the requirement names, in `work`. `file`, where known, says which platform to ask for."""
    asked = work / "requirements.txt"
    asked.write_text(requirement + "\n", encoding="utf-8")
    target, scratch = work / "wheel", work / "tmp"
    scratch.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--disable-pip-version-check", "--dest", str(target), "--requirement", str(asked), *_tags(file),
    ]  # fmt: skip
    if require_hashes:
        command.append("--require-hashes")
    # TMPDIR: what pip unpacks halfway has to be on the disk that was measured, and go away with `work`.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    # Its progress bar is on stdout and goes to our stderr, where ours are; its stderr holds what goes wrong.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise _reason(requirement.split()[0], done.stderr, work)
    return next(target.glob("*.whl"))


def _tags(file: str | None) -> list[str]:
    """Asks for the wheel that upstream.toml names, whatever interpreter runs this. pip refuses several Pythons at
    once, and abi3 of 3.8 is installable on every later one, so one that upstream supports stands for all."""
    if file is None:
        return []
    tags = parse_wheel_filename(file)[3]
    flags = ["--python-version", "3.12", "--implementation", "cp"]
    for abi in sorted({tag.abi for tag in tags}):
        flags += ["--abi", abi]
    for platform in sorted({tag.platform for tag in tags}):
        flags += ["--platform", platform]
    return flags


def _reason(what: str, complaint: str, work: Path) -> Exception:
    if hashes := _HASHES.search(complaint):
        return WrongHash(f"the {what} that the index serves", hashes["expected"], hashes["actual"])
    if _NO_ROOM.search(complaint):
        return DiskFull(work.parent, f"downloading {what}", None, disk.free(work.parent))
    if _NO_NETWORK.search(complaint):
        return DownloadFailed(f"pip cannot reach the package index for {what}; check network, proxy and pip's settings")
    lines = [line for line in complaint.splitlines() if line.startswith("ERROR")]
    reason = " ".join((lines or complaint.splitlines() or ["no reason given"])[-1].split())
    return DownloadFailed(f"pip could not download {what}: {reason.removeprefix('ERROR: ')}")
