"""A tree of upstream Python files to apply the series to: a wheel or a checkout.

Paths are relative to the vllm/ folder everywhere in the tool, as in patches/<topic>/.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Protocol

from fork.errors import BadWheel

PACKAGE = "vllm/"


class Base(Protocol):
    name: str

    def read(self, path: str) -> bytes | None: ...

    def has(self, path: str) -> bool: ...

    def python_files(self) -> list[str]: ...


class WheelBase:
    def __init__(self, wheel: Path) -> None:
        self.name = wheel.name
        self.archive = open_wheel(wheel)
        self.members = {name.removeprefix(PACKAGE) for name in self.archive.namelist() if name.startswith(PACKAGE)}
        if not self.members:
            raise BadWheel(f"{wheel} has no {PACKAGE} folder, so it is no vLLM wheel")

    def read(self, path: str) -> bytes | None:
        return self.archive.read(PACKAGE + path) if path in self.members else None

    def has(self, path: str) -> bool:
        return path in self.members

    def python_files(self) -> list[str]:
        return sorted(path for path in self.members if path.endswith(".py"))


class FolderBase:
    """A checkout (its vllm/ is used), or the package folder itself."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.root = folder / "vllm" if (folder / "vllm" / "__init__.py").is_file() else folder
        if not (self.root / "__init__.py").is_file():
            raise BadWheel(f"{folder} has neither vllm/__init__.py nor __init__.py, so it is no vLLM tree")

    def read(self, path: str) -> bytes | None:
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    def has(self, path: str) -> bool:
        return (self.root / path).exists()

    def python_files(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*.py"))


def open_wheel(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise BadWheel(f"{wheel} cannot be opened as a wheel: {error}") from None
