"""`fork apply DIR`."""

from __future__ import annotations

import errno
import os

import pytest

from fork import cli, disk, flavour, manifest, plan, tree
from fork.errors import CountMismatch, DiskFull, EditedByHand, NotOurTree


def write(project, folder, flavour="cuda", link=False, force=False):
    return tree.write(plan.make(project.repo, flavour), folder, link, force)


def snapshot(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "tree"


def test_contents(forked, folder):
    assert write(forked, folder)
    package = folder / "vllm"
    assert "check(config)" in (package / "core/planning.py").read_text()
    assert (package / "core/ours.py").read_text() == "VALUE = 1\n"
    assert not (package / "core/ours.py").is_symlink()
    assert (package / "_C.abi3.so").read_text() == "cuda code"
    assert "9.9.0+ampere.3'" in (package / "_version.py").read_text()
    assert os.listdir(folder.parent) == ["tree"]
    written = manifest.read(folder / manifest.NAME)
    assert (written.release, written.flavour) == ("9.9.0", "cuda")
    assert written.edited["core/planning.py"]["after"] == disk.sha256((package / "core/planning.py").read_bytes())
    assert written.edited["core/planning.py"]["before"] == disk.sha256(forked.base().read("core/planning.py"))
    assert written.added["core/ours.py"]["after"] == disk.sha256(b"VALUE = 1\n")


def test_cpu_takes_only_extensions_from_the_other_wheel(forked, folder):
    write(forked, folder, "cpu")
    assert (folder / "vllm/_C.abi3.so").read_text() == "cpu code"
    assert not (folder / "vllm/core/old.py").exists()
    assert not (folder / "vllm/csrc/kernel.h").exists()
    assert (folder / "vllm/__init__.py").read_text() == "from vllm._version import __version__\n"


def test_twice_writes_nothing(forked, folder):
    write(forked, folder)
    inode = (folder / "vllm").stat().st_ino
    assert not write(forked, folder)
    assert (folder / "vllm").stat().st_ino == inode


def test_changed_rules_rewrite_only_what_they_touch(forked, folder):
    write(forked, folder)
    same = {path: (folder / "vllm" / path).stat().st_ino for path in ("_C.abi3.so", "core/table.py")}
    path = forked.rules()
    path.write_text(path.read_text().replace("check(config)", "verify(config)"))
    assert write(forked, folder)
    assert "verify(config)" in (folder / "vllm/core/planning.py").read_text()
    assert {path: (folder / "vllm" / path).stat().st_ino for path in same} == same


def test_dropped_rule_and_module_restore_upstream(forked, folder):
    write(forked, folder)
    forked.repo.series.write_text("")
    assert write(forked, folder)
    assert (folder / "vllm/core/planning.py").read_bytes() == forked.base().read("core/planning.py")
    assert not (folder / "vllm/core/ours.py").exists()


def test_bytecode_of_touched_files_is_not_kept(forked, folder):
    write(forked, folder)
    cached = folder / "vllm/core/__pycache__"
    cached.mkdir()
    for name in ("planning", "table"):
        (cached / f"{name}.cpython-311.pyc").write_bytes(b"old")
    path = forked.rules()
    path.write_text(path.read_text().replace("check(config)", "verify(config)"))
    write(forked, folder)
    assert os.listdir(cached) == ["table.cpython-311.pyc"]


def test_linked_modules_are_live(forked, folder):
    write(forked, folder, link=True)
    (forked.repo.modules / "core/ours.py").write_text("VALUE = 2\n")
    assert (folder / "vllm/core/ours.py").read_text() == "VALUE = 2\n"
    assert not write(forked, folder, link=True)


@pytest.mark.parametrize("path", ["core/planning.py", "core/ours.py", "_version.py", "core/table.py"])
def test_edit_by_hand_is_refused_and_forced(forked, folder, path):
    write(forked, folder)
    file = folder / "vllm" / path
    original = file.read_bytes()
    file.write_text(file.read_text() + "# mine\n")
    with pytest.raises(EditedByHand, match=path) as caught:
        write(forked, folder)
    assert caught.value.paths == [path]
    assert file.read_text().endswith("# mine\n")
    assert write(forked, folder, force=True)
    assert file.read_bytes() == original


def test_edit_of_the_same_size_is_seen(forked, folder):
    write(forked, folder)
    (folder / "vllm/core/table.py").write_text("SIZE = 2\n")
    with pytest.raises(EditedByHand):
        write(forked, folder)


def test_new_and_missing_files_are_seen(forked, folder):
    write(forked, folder)
    (folder / "vllm/core/new.py").write_text("")
    (folder / "vllm/data.json").unlink()
    with pytest.raises(EditedByHand) as caught:
        write(forked, folder)
    assert caught.value.paths == ["core/new.py", "data.json"]


def test_foreign_folder_is_refused(forked, folder):
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(NotOurTree):
        write(forked, folder)
    assert snapshot(folder) == {"thesis.txt": b"mine"}


def test_failing_rules_write_nothing(forked, folder, rule):
    write(forked, folder)
    before = snapshot(folder)
    forked.rules(rule("absent", "absent()", "x()"), target="core/table.py")
    with pytest.raises(CountMismatch):
        write(forked, folder)
    assert snapshot(folder) == before


def test_failing_swap_keeps_the_old_tree(forked, folder, monkeypatch):
    write(forked, folder)
    before = snapshot(folder)
    forked.repo.series.write_text("")
    rename = os.rename

    def second_fails(source, target):
        if str(target) == str(folder) and "-old" not in str(source):
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="broken"):
        write(forked, folder)
    assert snapshot(folder) == before
    assert os.listdir(folder.parent) == ["tree"]


def test_no_room_seen_beforehand(forked, folder, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: _Usage(5))
    with pytest.raises(DiskFull, match="0 MiB are free"):
        write(forked, folder)
    assert os.listdir(folder.parent) == []


def test_no_room_met_while_unpacking(forked, folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tree.shutil, "copyfileobj", full)
    with pytest.raises(DiskFull, match="make room"):
        write(forked, folder)
    assert os.listdir(folder.parent) == []


class _Usage:
    def __init__(self, free):
        self.free = free


def test_command_line(forked, folder, capsys):
    assert cli.main(["apply", str(folder), "--flavour", "cpu"], forked.repo) == 0
    assert cli.main(["apply", str(folder), "--flavour", "cpu"], forked.repo) == 0
    assert "already applied, nothing to do" in capsys.readouterr().err
    assert cli.main(["apply", str(folder), "--flavour", "tpu"], forked.repo) == 2
    assert "--flavour is 'tpu'" in capsys.readouterr().err


def test_without_folder_it_is_the_editable_tree_with_links(forked, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert cli.main(["apply"], forked.repo) == 0
    assert (forked.root / "build/cpu/vllm/core/ours.py").is_symlink()


def test_renewing_keeps_the_flavour(forked, folder, monkeypatch):
    """On a machine with a driver, where a new tree would be a CUDA one."""
    monkeypatch.setattr(flavour, "driver_present", lambda: True)
    for place in (None, folder):
        where = [str(place)] if place else []
        assert cli.main(["apply", *where, "--flavour", "cpu"], forked.repo) == 0
        assert cli.main(["apply", *where], forked.repo) == 0
        assert manifest.read((place or forked.repo.tree("cpu")) / manifest.NAME).flavour == "cpu"
    assert not forked.repo.tree("cuda").exists()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert cli.main(["apply"], forked.repo) == 0
    assert forked.repo.tree("cuda").exists()
