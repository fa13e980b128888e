"""`fork apply --installed`, on a folder that looks like site-packages."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fork import check, cli, installed, package, transaction
from fork.errors import (
    CountMismatch,
    EditedByHand,
    ModuleCollision,
    NotApplied,
    NotInstalled,
    StaleFile,
    TargetDiffers,
    WrongRelease,
)


@pytest.fixture
def site(forked, tmp_path, monkeypatch):
    """The stock wheel unpacked where the interpreter finds distributions first."""
    folder = tmp_path / "site"
    zipfile.ZipFile(forked.cuda).extractall(folder)
    check.run(forked.repo, write=True)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def snapshot(site):
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def apply(project, force=False):
    return installed.apply(project.repo, package.find(), force)


def record(site):
    with (site / "vllm-9.9.0.dist-info/RECORD").open(newline="") as file:
        return {row[0]: row for row in csv.reader(file)}


def test_apply_and_revert(forked, site):
    before = snapshot(site)
    assert apply(forked)
    assert "check(config)" in (site / "vllm/core/planning.py").read_text()
    assert (site / "vllm/core/ours.py").read_text() == "VALUE = 1\n"
    assert "9.9.0+ampere.3" in (site / "vllm/_version.py").read_text()
    assert installed.revert(package.find()) == 4
    assert snapshot(site) == before


def test_no_wheel_is_needed(forked, site):
    forked.cuda.unlink()
    assert apply(forked)


def test_twice_writes_nothing(forked, site):
    apply(forked)
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.is_file()}
    assert not apply(forked)
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.is_file()} == before


def test_record_lists_added_files_with_their_hashes(forked, site):
    apply(forked)
    rows = record(site)
    for name in ("vllm/core/ours.py", "vllm/core/planning.py"):
        content = (site / name).read_bytes()
        assert rows[name] == list(installed.dist_info.record_line(name, content))
    assert "vllm-fork-manifest.json" in rows
    for name in rows:
        assert (site / name).exists()


def test_changed_rules_apply_to_the_originals(forked, site):
    before = snapshot(site)
    apply(forked)
    path = forked.rules()
    path.write_text(path.read_text().replace("check(config)", "verify(config)"))
    forked.module("core/deep/second.py")
    (forked.repo.modules / "core/ours.py").unlink()
    about = forked.repo.patches / "stages/topic.toml"
    about.write_text(about.read_text().replace("core/ours.py", "core/deep/"))
    assert apply(forked)
    text = (site / "vllm/core/planning.py").read_text()
    assert "verify(config)" in text and "check(config)" not in text
    assert not (site / "vllm/core/ours.py").exists()
    installed.revert(package.find())
    assert snapshot(site) == before
    assert not (site / "vllm/core/deep").exists()


def unchanged(site, project, kind, message):
    before = snapshot(site)
    with pytest.raises(kind, match=message) as caught:
        apply(project)
    assert snapshot(site) == before
    return caught.value


def test_other_release(forked, site):
    path = forked.repo.upstream_toml
    path.write_text(path.read_text().replace('version = "9.9.0"\nfork', 'version = "9.9.1"\nfork'))
    unchanged(site, forked, WrongRelease, "is 9.9.0, and the series is for 9.9.1")


def test_fork_itself(forked, site):
    (site / "vllm-9.9.0.dist-info").rename(site / "vllm-9.9.0+ampere.3.dist-info")
    path = site / "vllm-9.9.0+ampere.3.dist-info/METADATA"
    path.write_text(path.read_text().replace("Version: 9.9.0", "Version: 9.9.0+ampere.3"))
    unchanged(site, forked, WrongRelease, "is this fork already")


def test_target_that_differs(forked, site):
    path = site / "vllm/core/planning.py"
    path.write_text(path.read_text() + "# distributor's patch\n")
    unchanged(site, forked, TargetDiffers, "differs from the pinned release in core/planning.py")


def test_version_file_of_an_image_may_differ(forked, site):
    (site / "vllm/_version.py").write_text('__version__ = "9.9.0+image"\n')
    before = snapshot(site)
    apply(forked)
    installed.revert(package.find())
    assert snapshot(site) == before


def test_hashes_unknown(forked, site):
    forked.repo.targets.write_text("{}")
    unchanged(site, forked, StaleFile, "has no hash of core/planning.py")
    forked.repo.targets.unlink()
    unchanged(site, forked, StaleFile, "cannot be read")


def test_failing_rule_and_collision(forked, site, rule):
    (site / "vllm/core/ours.py").write_text("THEIRS = 1\n")
    unchanged(site, forked, ModuleCollision, "core/ours.py")
    (site / "vllm/core/ours.py").unlink()
    forked.rules(rule("absent", "absent()", "x()"))
    unchanged(site, forked, CountMismatch, "rule absent")


def test_edited_since(forked, site):
    apply(forked)
    path = site / "vllm/core/planning.py"
    path.write_text(path.read_text() + "# mine\n")
    before = snapshot(site)
    for action in (lambda: apply(forked), lambda: installed.revert(package.find())):
        with pytest.raises(EditedByHand, match="vllm/core/planning.py"):
            action()
        assert snapshot(site) == before
    assert apply(forked, force=True)
    assert "# mine" not in path.read_text()


def test_revert_without_apply(forked, site):
    with pytest.raises(NotApplied, match="nothing to revert"):
        installed.revert(package.find())


@pytest.mark.parametrize("call", range(1, 6))
def test_failure_at_any_file_restores_all(forked, site, monkeypatch, call):
    before = snapshot(site)
    replace, calls = os.replace, []

    def fails(source, target):
        calls.append(target)
        if len(calls) == call:
            raise OSError("broken")
        replace(source, target)

    monkeypatch.setattr(transaction.os, "replace", fails)
    with pytest.raises(OSError, match="broken"):
        apply(forked)
    assert len(calls) >= call
    assert snapshot(site) == before


def test_killed_apply_is_finished_or_reverted(forked, site):
    """The manifest is in place first, so what a kill leaves is upstream's or ours, file by file."""
    before = snapshot(site)
    apply(forked)
    half = {"vllm/core/planning.py": before["vllm/core/planning.py"], "vllm/core/ours.py": None}
    transaction.commit(site, half)
    assert apply(forked)
    assert "check(config)" in (site / "vllm/core/planning.py").read_text()
    transaction.commit(site, half)
    installed.revert(package.find())
    assert snapshot(site) == before


def test_stale_bytecode_goes(forked, site):
    cached = site / "vllm/core/__pycache__/planning.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"old")
    apply(forked)
    assert not cached.exists()


def test_editable_install_is_refused(forked, site):
    shutil.rmtree(site / "vllm")
    with pytest.raises(NotInstalled, match="editable install"):
        package.find()


def test_nothing_installed(tmp_path):
    """In an interpreter without site-packages, from a folder that has a vllm/ as this repository has."""
    (tmp_path / "vllm").mkdir()
    root = Path(package.__file__).parent.parent
    code = f"import sys; sys.path[1:1] = [{str(root)!r}]; from fork import package; package.find()"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "NotInstalled" in done.stderr and "has no vllm installed" in done.stderr


def test_finding_does_not_import(forked, site):
    (site / "vllm/__init__.py").write_text("raise RuntimeError('imported')\n")
    assert package.find().site == site
    assert "vllm" not in sys.modules or sys.modules["vllm"].__file__ != str(site / "vllm/__init__.py")


def test_command_line(forked, site, capsys):
    assert cli.main(["apply", "--installed"], forked.repo) == 0
    assert cli.main(["apply", "--installed"], forked.repo) == 0
    assert "already applied" in capsys.readouterr().err
    assert cli.main(["apply", "--installed", "--revert"], forked.repo) == 0
    assert cli.main(["apply", "--installed", "--revert"], forked.repo) == 2
    for wrong in (["apply", "--revert"], ["apply", "x", "--installed"]):
        with pytest.raises(SystemExit):
            cli.main(wrong, forked.repo)
