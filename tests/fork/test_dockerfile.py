"""The Dockerfile's steps, executed without Docker: each RUN in a fresh environment that holds the stock wheel.

What this leaves open is the base image itself; its Python package is the wheel's, which `apply --installed` verifies
by hash before it writes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from fork import disk, fetch, topics, upstream
from fork.repo import HERE

DOCKERFILE = HERE.root / "Dockerfile"


def steps() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_base_image_is_the_pinned_release():
    values = dict(value.split("=", 1) for word, value in steps() if word == "ARG")
    (image,) = [value for word, value in steps() if word == "FROM"]
    for name, value in values.items():
        image = image.replace(f"${{{name}}}", value)
    assert image == f"vllm/vllm-openai:v{upstream.load(HERE.upstream_toml).version}"


def test_only_known_steps():
    """A step that this file cannot execute would go untested."""
    assert {word for word, _ in steps()} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN"}


class Image:
    """A root folder, a working directory in it, and an environment whose python3 comes first."""

    def __init__(self, root: Path, environment: Path) -> None:
        self.root, self.environment, self.folder = root, environment, root

    def step(self, word: str, value: str) -> None:
        if word == "WORKDIR":
            self.folder = self.root / value.lstrip("/")
            self.folder.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = value.split()
            for source in sources:
                self.copy(HERE.root / source, self.folder / target)
        elif word == "RUN":
            self.run(value)

    def copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target if target.suffix else target / source.name)

    def run(self, command: str) -> subprocess.CompletedProcess:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
        # No cache of ours either: an image build has no wheel and must not fetch one.
        inherited |= {"PATH": f"{self.environment}/bin:{inherited['PATH']}", "VLLM_FORK_CACHE": "/nonexistent"}
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=inherited, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture
def image(tmp_path):
    release = upstream.load(HERE.upstream_toml)
    stock = fetch.ensure(release, release.bases)[release.bases[0]]
    environment = tmp_path / "venv"
    # With pip, since the steps call it; this one's packages lie behind, so that nothing has to be downloaded.
    venv.create(environment, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment}))
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install"]
    subprocess.run([*pip, "-q", "--no-deps", "--no-index", "--no-compile", str(stock)], check=True)
    (site / "behind.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    made = Image(tmp_path / "root", environment)
    made.site = site
    return made


def hashes(site: Path) -> dict[str, str]:
    """Everything of the distribution that is text, which is all that an apply may touch."""
    places = [*site.glob("vllm/**/*"), *site.glob("vllm-*/*"), *site.glob("vllm*.json")]
    kept = (place for place in places if place.is_file() and place.suffix not in (".so", ".pyc", ".h", ".hpp"))
    return {place.relative_to(site).as_posix(): disk.sha256_file(place) for place in kept}


@pytest.mark.slow
def test_steps(image):
    before = hashes(image.site)
    for step in steps():
        image.step(*step)
    applied = hashes(image.site)
    series = topics.load_all(HERE)
    edited = {f"vllm/{file.target}" for topic in series for file in topic.rule_files}
    added = {f"vllm/{path}" for topic in series for path in topic.modules}
    changed = {name for name in before if before[name] != applied[name]}
    assert edited <= changed
    assert {name for name in changed - edited if ".dist-info/" not in name} == {"vllm/_version.py"}
    assert applied.keys() - before.keys() == added | {"vllm-fork-manifest.json"}

    image.folder = image.root / "opt/vllm-ampere"
    image.run("python3 -m fork apply --installed --revert")
    assert hashes(image.site) == before

    image.run("python3 -m fork apply --installed")
    image.run("python3 -m pip uninstall --yes --quiet vllm")
    assert hashes(image.site) == {}
