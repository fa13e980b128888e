"""The build backend of pyproject.toml (PEP 517 and 660), so that `pip install .` needs no build step before it.

setuptools would have to be taught that the packages come out of another wheel, compressed; a backend is five
functions, and each is one call here.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from fork import dist_info, plan, tree, wheel
from fork.errors import ForkError
from fork.repo import HERE

README = HERE.root / "README.md"


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    with _sentence():
        return wheel.full(plan.make(HERE), Path(wheel_directory), README)


def build_editable(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    with _sentence():
        made = plan.make(HERE)
        place = HERE.tree(made.flavour.name)
        tree.write(made, place, link=True)
        return wheel.editable(made, Path(wheel_directory), place, README)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict | None = None) -> str:
    """Without this hook pip would build the whole wheel just to read its requirements."""
    with _sentence():
        found = plan.sources(HERE)
        name = dist_info.folder(found.version)
        for file, content in dist_info.files(found, README).items():
            place = Path(metadata_directory) / name / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        return name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    """The committed files: what anybody needs to build the wheel, upstream's part being downloaded then."""
    with _sentence():
        found = plan.sources(HERE)
        stem = f"{dist_info.NAME}-{found.version}"
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=HERE.root, capture_output=True, check=False)
        if listing.returncode != 0:
            raise ForkError(f"a source archive is made of committed files, and {HERE.root} is no git checkout")
        with tarfile.open(Path(sdist_directory) / f"{stem}.tar.gz", "w:gz") as archive:
            for path in listing.stdout.decode().split("\0"):
                if path:
                    archive.add(HERE.root / path, f"{stem}/{path}", recursive=False)
            metadata = dist_info.files(found, README)["METADATA"]
            entry = tarfile.TarInfo(f"{stem}/PKG-INFO")
            entry.size = len(metadata)
            archive.addfile(entry, io.BytesIO(metadata))
        return f"{stem}.tar.gz"


class _sentence:
    """pip prints a backend's traceback; the sentence that matters should not have to be looked for in it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, ForkError):
            raise SystemExit(f"error: {error}") from None
