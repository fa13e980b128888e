"""Near misses have to parse, to miss, and to be near."""

from __future__ import annotations

import pytest

from fork import nearmiss, series


def problems(project):
    outcome = series.apply(project.repo, project.topics(), project.base())
    return [str(problem) for done in outcome.edits for problem in nearmiss.problems(done)]


def test_good_one(forked):
    assert problems(forked) == []


@pytest.mark.parametrize(
    ("snippet", "message"),
    [
        ("raise ValueError(", "is not valid Python"),
        ("raise NotImplementedError('other text')", "is matched 1 times, expected 0"),
        ("x = 1", "resembles its target by 0.00, expected at least 0.5"),
    ],
)
def test_bad_ones_name_the_rule(project, rule, snippet, message):
    project.topic()
    project.rules(rule("guard", "raise NotImplementedError($M)", "pass", near_miss=snippet))
    (problem,) = problems(project)
    assert message in problem and "rule guard" in problem and "planning.py.yml" in problem


def test_context_is_free():
    """A rule narrowed by its surroundings needs a snippet with other surroundings."""
    snippet = "class Elsewhere:\n    def another(self, a, b):\n        if a:\n            return b\n        x = [l for l in y]\n"
    assert nearmiss.similarity("x = [l for l in z]", snippet) > 0.8


def test_a_fragment_of_a_long_target_is_not_near():
    target = "\n".join(f"value_{i} = compute({i})" for i in range(20))
    assert nearmiss.similarity(target, "value_0 = compute(0)") < nearmiss.NEAR


def test_only_the_rule_itself_is_tried(project, rule):
    """Another rule of the file may well match the snippet."""
    project.topic()
    wide = rule("wide", "names = [layer for layer in groups]", "names = groups", "names = [x for x in groups]", 2)
    narrow = rule(
        "narrow",
        "raise NotImplementedError($M)",
        "pass",
        'raise NotImplemented("one stage only"); names = [layer for layer in groups]',
    )
    project.rules(wide + "---\n" + narrow)
    assert problems(project) == []
