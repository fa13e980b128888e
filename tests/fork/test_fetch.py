"""The wheel cache, with the real pip and a folder in place of an index."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from fork import cli, disk, fetch, pip_download
from fork.errors import DiskFull, DownloadFailed, NotWritable, WrongHash


@pytest.fixture
def index(project, tmp_path, monkeypatch):
    """Both wheels on offer, the cache empty."""
    folder = tmp_path / "index"
    shutil.copytree(project.cache, folder)
    shutil.rmtree(project.cache)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def ensure(project, *keys):
    return fetch.ensure(project.upstream(), keys)


def left_in(project):
    return sorted(os.listdir(project.cache)) if project.cache.exists() else []


def test_download_verifies_and_leaves_only_the_wheel(project, index, capsys):
    assert cli.main(["fetch", "--flavour", "cpu"], project.repo) == 0
    assert capsys.readouterr().out.splitlines() == [str(project.cuda), str(project.cpu)]
    names = [project.cuda.name, project.cpu.name]
    assert left_in(project) == sorted(names + [f"{name}.verified" for name in names])


def test_wrong_hash_on_the_index(project, index, build_wheel):
    build_wheel(index, "vllm", "9.9.0", {"vllm/__init__.py": "tampered = 1\n"}, "")
    actual = disk.sha256_file(index / project.cuda.name)
    with pytest.raises(WrongHash) as caught:
        ensure(project, "cuda")
    assert caught.value.actual == actual
    assert caught.value.expected == project.upstream().wheels["cuda"].sha256
    assert actual in str(caught.value) and "vllm==9.9.0" in str(caught.value)
    assert left_in(project) == []


def test_truncated_wheel_in_the_cache(project):
    project.cuda.write_bytes(project.cuda.read_bytes()[:-10])
    upstream = project.upstream()
    with pytest.raises(WrongHash, match=project.cuda.name):
        fetch.ensure(upstream, ["cuda"])


def test_stamp_saves_hashing_until_the_file_changes(project, monkeypatch):
    ensure(project, "cuda")
    counted = []
    real = disk.sha256_file
    monkeypatch.setattr(disk, "sha256_file", lambda *a: counted.append(a) or real(*a))
    ensure(project, "cuda")
    assert counted == []
    os.utime(project.cuda, ns=(1, 1))
    ensure(project, "cuda")
    assert len(counted) == 1


def test_no_room_seen_before_the_download(project, index, monkeypatch):
    monkeypatch.setattr(disk, "free", lambda _: 0)
    monkeypatch.setattr(pip_download, "download", lambda *a, **k: pytest.fail("downloaded"))
    with pytest.raises(DiskFull, match="downloading vllm-9.9.0"):
        ensure(project, "cuda")
    assert left_in(project) == []


def test_no_room_met_in_the_middle(project, index, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pip_download, "download", full)
    with pytest.raises(DiskFull):
        ensure(project, "cuda")
    assert left_in(project) == []


def test_folder_of_somebody_else(project, index, monkeypatch):
    """Simulated: tests may run as root, whom no permission stops."""

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/their/cache")

    monkeypatch.setattr(pip_download, "download", denied)
    with pytest.raises(NotWritable, match="/their/cache cannot be written"):
        ensure(project, "cuda")


def test_stamp_that_cannot_be_written_is_done_without(project):
    (project.cache / f"{project.cuda.name}.verified").mkdir()
    assert ensure(project, "cuda") == {"cuda": project.cuda}


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", DiskFull),
        ("WARNING: Retrying ... NameResolutionError(...)\nERROR: No matching distribution found", DownloadFailed),
    ],
)
def test_pips_complaints(tmp_path, complaint, kind):
    reason = pip_download._reason("vllm==9.9.0", complaint, tmp_path)
    assert type(reason) is kind and "vllm==9.9.0" in str(reason) and "\n" not in str(reason)


def test_not_on_the_index(project, index):
    (index / project.cuda.name).unlink()
    with pytest.raises(DownloadFailed, match="No matching distribution found for vllm==9.9.0"):
        ensure(project, "cuda")
    assert left_in(project) == []


def test_no_network(project, index, monkeypatch, capsys):
    """A port that nobody listens on. One retry: pip says what is wrong only when it announces one."""
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/simple"), ("RETRIES", "1"), ("FIND_LINKS", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "PIP_EXTRA_INDEX_URL", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["fetch", "--flavour", "cuda"], project.repo) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last
        == "fork fetch: pip cannot reach the package index for vllm==9.9.0; check network, proxy and pip's settings"
    )
    assert left_in(project) == []


def test_cache_location(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_FORK_CACHE", raising=False)
    assert fetch.cache() == tmp_path / "vllm-ampere"
    monkeypatch.setenv("VLLM_FORK_CACHE", str(tmp_path / "own"))
    assert fetch.cache() == tmp_path / "own"
