"""The vllm that the running interpreter has installed: found by its metadata, never imported.

Importing it would load torch and pick a platform, and from the repository root the name has another meaning.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fork.errors import NotInstalled, WrongRelease


@dataclass(frozen=True)
class Package:
    """`site` is the folder that holds vllm/ and its dist-info."""

    site: Path
    version: str
    record: str | None  # path below site; None where the installer kept none

    @property
    def manifest(self) -> str:
        return "vllm-fork-manifest.json"


def find() -> Package:
    try:
        found = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise NotInstalled(
            f"{sys.executable} has no vllm installed; use the interpreter of the image or environment"
        ) from None
    site = Path(found.locate_file("")).resolve()
    if not (site / "vllm" / "__init__.py").is_file():
        raise NotInstalled(
            f"vllm {found.version} in {site} is an editable install; change its tree with `python -m fork apply`"
        )
    folder = f"vllm-{found.version}.dist-info"
    record = f"{folder}/RECORD"
    return Package(site, found.version, record if (site / record).is_file() else None)


def require_release(package: Package, release: str) -> None:
    public, _, local = package.version.partition("+")
    if local.startswith("ampere"):
        raise WrongRelease(
            f"vllm {package.version} in {package.site} is this fork already; the series applies to {release}"
        )
    if public != release:
        raise WrongRelease(
            f"vllm in {package.site} is {package.version}, and the series is for {release}; install that release"
        )


class InstalledBase:
    """The package as upstream shipped it: files that an earlier apply changed are seen as they were before."""

    def __init__(self, package: Package, originals: Mapping[str, bytes | None]) -> None:
        self.name = str(package.site / "vllm")
        self.root, self.originals = package.site, originals

    def read(self, path: str) -> bytes | None:
        name = f"vllm/{path}"
        if name in self.originals:
            return self.originals[name]
        file = self.root / name
        return file.read_bytes() if file.is_file() else None

    def has(self, path: str) -> bool:
        return self.read(path) is not None

    def python_files(self) -> list[str]:
        return sorted(file.relative_to(self.root / "vllm").as_posix() for file in (self.root / "vllm").rglob("*.py"))
