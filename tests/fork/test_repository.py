"""The real series on the real release, and the promise that one file names it."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fork import check, fetch, requirements, upstream
from fork.repo import HERE

RELEASE = upstream.load(HERE.upstream_toml)
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def test_the_series_holds():
    """Counts, near misses, owners of modules, generated pages; `python -m fork check` prints the same."""
    assert [str(problem) for problem in check.run(HERE).problems] == []


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=HERE.root, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [HERE.root / name for name in listing.stdout.decode().split("\0") if name and (HERE.root / name).is_file()]


def live_values(path: Path) -> list[str]:
    """Texts in a file that a program reads; comments and docstrings may speak of releases."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    return [node.value for node in constants if isinstance(node.value, str)]


def is_program(path: Path) -> bool:
    return path.suffix == ".py" or path.name in ("Makefile", "Dockerfile", "pyproject.toml", "run")


def test_only_upstream_toml_names_the_release():
    naming = {
        path.relative_to(HERE.root).as_posix()
        for path in tracked()
        if is_program(path) and any(RELEASE.version in value for value in live_values(path))
    }
    # FROM cannot read a file; test_dockerfile.py compares its default.
    assert naming == {"Dockerfile"}


def test_module_folder_gives_way_to_the_installed_package():
    assert HERE.modules.is_dir()
    assert not (HERE.modules / "__init__.py").exists()


def test_every_module_names_its_licence():
    """They are installed among upstream's files, each of which does."""
    modules = [path for path in tracked() if path.suffix == ".py" and HERE.modules in path.parents]
    assert modules
    without = [str(path) for path in modules if (text := path.read_text("utf-8")) and not text.startswith(LICENCE)]
    assert without == []


def test_python_versions_are_upstreams():
    wheel = fetch.ensure(RELEASE, RELEASE.bases)[RELEASE.bases[0]]
    ours = tomllib.loads((HERE.root / "pyproject.toml").read_text())["project"]["requires-python"]
    assert set(ours.split(",")) == set(requirements.read_metadata(wheel)["Requires-Python"].split(","))


@pytest.mark.slow
def test_command_line_of_the_installed_fork_starts():
    """It imports every subcommand, and so most of what the derived requirements have to provide."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the fork is not installed here")
    if "+ampere" not in version:
        pytest.skip(f"vllm {version} is not the fork")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"]
    done = subprocess.run(command, cwd=HERE.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == version


def test_make_targets_parse():
    """Dry, and as if nothing were installed: what each runs is the tool and pytest, tested themselves."""
    targets = ["install", "demo", "serve", "test", "check", "docs", "clean"]
    done = subprocess.run(["make", "-n", "-B", *targets], cwd=HERE.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = ["fork fetch", "pip install", "fork apply", "demo", "demo --serve", "fork check", "pytest", "fork docs"]
    assert [step for step in steps if step not in done.stdout] == []


def test_files_of_the_tool_stay_small():
    sizes = sorted(path.read_text().count("\n") for path in (HERE.root / "fork").glob("*.py"))
    assert sizes[len(sizes) // 2] < 100 and sizes[-1] < 200
