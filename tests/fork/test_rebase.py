"""Every verdict of `fork rebase`."""

from __future__ import annotations

import pytest

from fork import cli, onto, rebase
from fork.base import FolderBase
from fork.errors import BadWheel, DownloadFailed


@pytest.fixture
def release(forked, tmp_path):
    """The next release as a checkout; tests change it."""
    folder = tmp_path / "next"
    for path in forked.base().python_files():
        file = folder / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(forked.base().read(path))
    return folder


def verdicts(project, release):
    found = rebase.verdicts(project.repo, project.topics(), project.base(), FolderBase(release))
    return {verdict.rule: verdict.text for verdict in found}


def change(release, old, new, path="core/planning.py"):
    file = release / "vllm" / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


GUARD = 'raise NotImplementedError("one stage only")'


def test_applies(forked, release):
    assert verdicts(forked, release) == {"stages-guard": "applies"}


def test_another_count(forked, release):
    change(release, GUARD, f"{GUARD}\n    {GUARD}")
    assert verdicts(forked, release) == {"stages-guard": "matches 2≠1"}
    change(release, GUARD, "pass")
    assert verdicts(forked, release) == {"stages-guard": "matches 0≠1"}


def test_target_gone(forked, release):
    (release / "vllm/core/planning.py").unlink()
    assert verdicts(forked, release) == {"stages-guard": "target gone"}


def test_already_upstream_whatever_the_layout(forked, release):
    change(release, GUARD, "check(\n            config\n        )")
    assert verdicts(forked, release) == {"stages-guard": "already upstream"}


def test_text_that_was_there_before_proves_nothing(project, rule, tmp_path):
    project.topic()
    project.rules(rule("weak", "raise NotImplementedError($M)", "names = [layer for layer in groups]"))
    release = tmp_path / "package"
    (release / "core").mkdir(parents=True)
    (release / "__init__.py").write_text("")
    (release / "core/planning.py").write_text(project.base().read("core/planning.py").decode().replace(GUARD, "pass"))
    assert verdicts(project, release) == {"weak": "matches 0≠1"}


def test_one_failure_hides_no_other(forked, release, rule):
    forked.rules(rule("a", "SIZE = 1", "SIZE = 7"), target="core/table.py")
    forked.topic("later")
    forked.rules(rule("later", "check(config)", "check(config, 1)"), topic="later")
    change(release, "SIZE = 1", "SIZE = 9", "core/table.py")
    assert verdicts(forked, release) == {
        "stages-guard": "applies",
        "a": "matches 0≠1",
        "later": "applies",
    }


def test_rules_that_hold_singly_and_not_together(forked, release, rule):
    forked.rules(rule("cut", "SIZE = 1", "SIZE = = 1"), target="core/table.py")
    assert "is not valid Python" in verdicts(forked, release)["cut"]


def test_added_module_that_upstream_has_now(forked, release):
    (release / "vllm/core/ours.py").write_text("")
    assert verdicts(forked, release) == {"stages-guard": "applies", "-": "module exists upstream"}


def test_status_and_table(forked, release, capsys):
    assert cli.main(["rebase", "--onto", str(release)], forked.repo) == 0
    assert "1 of 1 hold" in capsys.readouterr().out
    change(release, GUARD, "pass")
    assert cli.main(["rebase", "--onto", str(release)], forked.repo) == 1
    out = capsys.readouterr().out
    assert "core/planning.py  stages-guard  matches 0≠1" in out and "0 of 1 hold" in out


def test_onto_a_wheel(forked):
    with onto.base(str(forked.cpu), forked.upstream()) as base:
        assert base.has("core/old.py")


def test_onto_a_version_says_that_it_has_no_hash(forked, monkeypatch, capsys):
    def download(requirement, file, work, require_hashes):
        assert (requirement, require_hashes) == ("vllm==9.9.1", False)
        return forked.cuda

    monkeypatch.setattr(onto.pip_download, "download", download)
    assert cli.main(["rebase", "--onto", "vllm==9.9.1"], forked.repo) == 0
    assert "without a hash" in capsys.readouterr().err


def test_onto_nonsense(forked, tmp_path):
    with pytest.raises(DownloadFailed, match="neither vllm==VERSION nor"):
        with onto.base("wheel-of-fortune", forked.upstream()):
            pass
    with pytest.raises(BadWheel, match="no vLLM tree"):
        with onto.base(str(tmp_path), forked.upstream()):
            pass
