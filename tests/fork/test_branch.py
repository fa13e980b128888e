"""`fork branch`: history, messages, and hashes that anybody can reproduce."""

from __future__ import annotations

import subprocess

import pytest

from fork import cli
from fork.errors import ForkError, NotOurTree


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def two(forked, rule):
    forked.topic("later")
    forked.rules(rule("later-one", "check(config)", "check(config, 2)"), topic="later")
    return forked


def write(project, folder):
    assert cli.main(["branch", str(folder)], project.repo) == 0
    return folder


def test_one_commit_per_topic(two, tmp_path):
    folder = write(two, tmp_path / "b")
    subjects = git(folder, "log", "--reverse", "--format=%s").splitlines()
    assert subjects == ["vLLM 9.9.0: Python files", "Title of stages", "Title of later"]
    assert git(folder, "show", "--name-status", "--format=", "HEAD~1").split("\n")[:2] == [
        "A\tvllm/core/ours.py",
        "M\tvllm/core/planning.py",
    ]
    assert "+        check(config, 2)" in git(folder, "show", "HEAD")
    assert git(folder, "status", "--porcelain") == ""
    assert (folder / "vllm/core/ours.py").read_text() == "VALUE = 1\n"


def test_base_is_upstreams_python_without_binaries(two, tmp_path):
    folder = write(two, tmp_path / "b")
    listed = git(folder, "ls-tree", "-r", "--name-only", "HEAD~2").split()
    assert "vllm/core/planning.py" in listed and not [name for name in listed if name.endswith(".so")]
    assert git(folder, "show", "HEAD~2:vllm/core/planning.py").encode() == two.base().read("core/planning.py")


def test_message_says_why(two, tmp_path):
    message = git(write(two, tmp_path / "b"), "log", "-1", "--format=%B", "HEAD~1")
    for part in (
        "Because of stages.",
        "- vllm/core/planning.py: Lets every stage plan.",
        "Related: vllm-project/vllm#1",
    ):
        assert part in message


def test_same_input_same_hash(two, tmp_path, monkeypatch):
    first = git(write(two, tmp_path / "a"), "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "somebody else")
    assert git(write(two, tmp_path / "b"), "rev-parse", "HEAD") == first


def test_topics_make_patches(two, tmp_path):
    folder = write(two, tmp_path / "b")
    made = git(folder, "format-patch", "-2", "-o", str(tmp_path / "out")).split()
    assert [name.rsplit("/", 1)[1] for name in made] == ["0001-Title-of-stages.patch", "0002-Title-of-later.patch"]


def test_refuses_a_folder_in_use(two, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("")
    assert cli.main(["branch", str(tmp_path / "b")], two.repo) == 2
    from fork import branch

    with pytest.raises(NotOurTree):
        branch.write(two.repo, two.upstream(), two.topics(), two.base(), tmp_path / "b")


def test_failing_rules_leave_no_repository(two, tmp_path, rule):
    two.rules(rule("absent", "absent()", "x()"), topic="later")
    assert cli.main(["branch", str(tmp_path / "b")], two.repo) == 2
    assert not (tmp_path / "b").exists()
    assert issubclass(NotOurTree, ForkError)
