"""`fork check`: each problem is found, and the page and hashes are held to the topics."""

from __future__ import annotations

import json

import pytest

from fork import check, cli, disk, series, topics


@pytest.fixture
def fresh(forked):
    check.run(forked.repo, write=True)
    return forked


def messages(project):
    return [str(problem) for problem in check.run(project.repo).problems]


def test_clean(fresh, capsys):
    assert cli.main(["check"], fresh.repo) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == "topic files edited rules upstream − upstream + our lines".split()
    assert table[2].split() == ["stages", "1", "1", "1", "1", "1"]
    assert table[3].split() == ["total", "1", "1", "1", "1", "1"]


def test_problems_give_status_1(fresh, capsys):
    fresh.module("core/stray.py")
    assert cli.main(["check"], fresh.repo) == 1
    assert "core/stray.py belongs to no topic" in capsys.readouterr().err


def test_stale_page_and_hashes(fresh):
    fresh.repo.page.write_text(fresh.repo.page.read_text() + "by hand\n")
    fresh.repo.targets.write_text("{}\n")
    found = messages(fresh)
    assert len(found) == 2
    assert all("is not what the topics generate" in text for text in found)
    assert cli.main(["docs"], fresh.repo) == 0
    assert messages(fresh) == []


def test_missing_page(fresh):
    fresh.repo.page.unlink()
    assert "patches.md is not what" in messages(fresh)[0]


def test_changed_reason_makes_the_page_stale(fresh):
    path = fresh.rules()
    path.write_text(path.read_text().replace("works by now", "works since 9.9"))
    assert [text for text in messages(fresh) if "patches.md" in text]


def test_wrong_count_is_found_and_nothing_is_generated(fresh, rule):
    fresh.rules(rule("absent", "absent()", "x()"), target="core/table.py")
    before = fresh.repo.page.read_text()
    report = check.run(fresh.repo, write=True)
    assert ["matches 0 times" in str(problem) for problem in report.problems] == [True]
    assert fresh.repo.page.read_text() == before


def test_near_misses_are_part_of_it(fresh, rule):
    fresh.rules(rule("size", "SIZE = 1", "SIZE = 2", near_miss="SIZE = 1"), target="core/table.py")
    assert [text for text in messages(fresh) if "rule size is matched 1 times" in text]


def test_module_that_does_not_compile(fresh):
    fresh.module(text="def broken(:\n")
    assert [text for text in messages(fresh) if "vllm/core/ours.py is not valid Python" in text]


def test_hashes_are_of_the_pinned_files(fresh):
    assert json.loads(fresh.repo.targets.read_text()) == {
        "core/planning.py": disk.sha256(fresh.base().read("core/planning.py"))
    }


def test_page_says_what_why_and_when_to_drop(fresh):
    page = fresh.repo.page.read_text()
    for part in (
        "vLLM 9.9.0",
        "Because of stages.",
        "Drop when: never",
        "`core/planning.py` | [stages](#stages)",
        "`stages-guard`: Lets every stage plan. The guard was for something that works by now.",
        "[vllm-project/vllm#1](https://github.com/vllm-project/vllm/issues/1) (open)",
    ):
        assert part in page


def test_page_shows_our_lines_and_none_of_upstreams(fresh):
    page = fresh.repo.page.read_text()
    shown = [block.split("```")[0] for block in page.split("```diff\n")[1:]]
    assert shown and all(line.startswith(("@@", "+")) for block in shown for line in block.splitlines())
    (edit,) = series.apply(fresh.repo, topics.load_all(fresh.repo), fresh.base()).edits
    (at, removed, added), *rest = edit.hunks(edit.matches[0])
    assert removed and all(f"+{line}" in page for line in added)
    assert f"line {at} @@" in page


def test_page_links_bare_numbers_to_upstream(fresh):
    about = fresh.repo.patches / "stages/topic.toml"
    about.write_text(about.read_text().replace("never", "with #54793, not sooner"))
    check.run(fresh.repo, write=True)
    assert "with [#54793](https://github.com/vllm-project/vllm/issues/54793), not" in fresh.repo.page.read_text()


def test_further_bases_are_proven_too(fresh, build_wheel):
    other = build_wheel(fresh.cache, "vllm", "9.9.1", {"vllm/core/planning.py": "x = 1\n"}, "")
    text = fresh.repo.upstream_toml.read_text().replace('bases = ["cuda"]', 'bases = ["cuda", "next"]')
    text += (
        f'[wheels.next]\nproject = "vllm"\nversion = "9.9.1"\nfile = "{other.name}"\n'
        f'sha256 = "{disk.sha256_file(other)}"\nsize = 1\n'
    )
    fresh.repo.upstream_toml.write_text(text)
    assert ["matches 0 times" in text for text in messages(fresh)] == [True]
