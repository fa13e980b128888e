"""Rules on one file: counts, overlaps, and what the bytes look like afterwards."""

from __future__ import annotations

import pytest

from fork import edits, rules, series
from fork.errors import (
    AstGrepError,
    CountMismatch,
    IdleRule,
    ModuleCollision,
    OverlappingEdits,
    ResultDoesNotCompile,
    SeriesFailed,
    TargetGone,
)


def result(project):
    outcome = series.apply(project.repo, project.topics(), project.base())
    return {path: after.decode() for path, (_, after) in outcome.files.items()}


def test_offsets_are_bytes(forked):
    """The docstring's dash is three bytes: counted in characters, the edit would land two to the left."""
    assert "    if config.pp_size > 1:\n        check(config)\n    names" in result(forked)["core/planning.py"]


@pytest.mark.parametrize(("pattern", "actual"), [("nothing_like_it()", 0), ("names = [layer for layer in groups]", 2)])
def test_wrong_count_names_rule_file_and_count(project, rule, pattern, actual):
    project.topic()
    project.rules(rule("one", pattern, "x = 1"))
    with pytest.raises(CountMismatch) as caught:
        result(project)
    assert (caught.value.expected, caught.value.actual) == (1, actual)
    for part in ("rule one", "topic stages", "core/planning.py", f"matches {actual} times", "expected 1"):
        assert part in str(caught.value)


def test_expected_count_of_two(project, rule):
    project.topic()
    project.rules(rule("both", "names = [layer for layer in groups]", "names = list(groups)", count=2))
    assert result(project)["core/planning.py"].count("names = list(groups)") == 2


def test_all_wrong_counts_are_reported_at_once(project, rule):
    project.topic()
    project.rules(rule("one", "absent()", "x()") + "---\n" + rule("two", "gone()", "x()"))
    with pytest.raises(SeriesFailed) as caught:
        result(project)
    assert [problem.rule for problem in caught.value.problems] == ["one", "two"]


def test_overlap(project, rule):
    project.topic()
    inner = rule("inner", "len", "abs")
    project.rules(rule("outer", "return sorted(names, key=len)", "return names") + "---\n" + inner)
    with pytest.raises(OverlappingEdits, match="outer and inner"):
        result(project)


def test_nested_matches_of_one_rule_overlap(project, rule):
    project.topic()
    project.rules(rule("deep", "f($A)", "g($A)", count=2), target="core/table.py")
    file = project.topics()[0].rule_files[0]
    with pytest.raises(OverlappingEdits, match="deep and deep"):
        edits.edit(file, b"f(f(1))\n")


def test_result_must_compile(project, rule):
    project.topic()
    project.rules(rule("broken", "SIZE = 1", "SIZE = = 1"), target="core/table.py")
    with pytest.raises(ResultDoesNotCompile, match=r"broken in core/table.py \(topic stages\)"):
        result(project)


def test_rule_without_effect(project, rule):
    project.topic()
    project.rules(rule("idle", "SIZE = 1", "SIZE = 1"), target="core/table.py")
    with pytest.raises(IdleRule, match="idle"):
        result(project)


def test_ast_grep_complaints_name_the_file(project, rule):
    project.topic()
    project.rules(rule("bad", "a ; b", "c"))
    with pytest.raises(AstGrepError, match="planning.py.yml"):
        result(project)


def test_missing_target(project, rule):
    project.topic()
    project.rules(rule("one", "a", "b"), target="core/gone.py")
    with pytest.raises(TargetGone, match="core/gone.py"):
        result(project)


def test_later_topic_sees_the_earlier_result(forked, rule):
    forked.topic("later")
    forked.rules(rule("later-one", "check(config)", "check(config, 2)"), topic="later")
    assert "check(config, 2)" in result(forked)["core/planning.py"]
    # The other way round there is nothing to find yet.
    forked.repo.series.write_text("later\nstages\n")
    with pytest.raises(CountMismatch, match="later-one"):
        result(forked)


def test_rules_of_one_file_do_not_see_each_other(project, rule):
    project.topic()
    project.rules(
        rule("a", "SIZE = 1", "SIZE = 2") + "---\n" + rule("b", "SIZE = 2", "SIZE = 3"), target="core/table.py"
    )
    with pytest.raises(CountMismatch, match="rule b"):
        result(project)


def test_expand_end_takes_the_comma_along(project):
    project.topic()
    project.rules(
        """\
        id: drop-key
        language: Python
        message: m
        note: n
        rule: {kind: keyword_argument, regex: "^key=len$"}
        fix: {template: "", expandEnd: {regex: ","}}
        metadata: {near_miss: "sorted(x, key=max)"}
        """
    )
    assert "key=len" not in result(project)["core/planning.py"]
    assert "  # short ones first" in result(project)["core/planning.py"]


def test_added_module_that_exists_upstream(project):
    project.module("core/table.py")
    project.topic(adds=("core/table.py",))
    with pytest.raises(ModuleCollision, match="vllm/core/table.py"):
        result(project)


def test_lines_changed(tmp_path):
    path = tmp_path / "x.py.yml"
    path.write_text(
        "id: x\nlanguage: Python\nmessage: m\nnote: n\nrule: {pattern: b = 2}\nfix: |-\n  b = 3\n  c = 4\n"
        "metadata: {near_miss: b = 9}\n"
    )
    file = rules.load(path, "t", "x.py")
    assert edits.edit(file, b"a = 1\nb = 2\nd = 5\n").lines_changed() == (1, 2)
