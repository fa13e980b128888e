"""The worked example of CONTRIBUTING.md works."""

from __future__ import annotations

import re
import textwrap

import pytest

from fork import nearmiss, series
from fork.base import WheelBase
from fork.repo import HERE


def block(language: str) -> str:
    """The first fenced block of that language, as a reader would copy it."""
    text = (HERE.root / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    return textwrap.dedent(found[2])


@pytest.fixture
def example(project, build_wheel):
    project.cuda = build_wheel(project.cache, "vllm", "9.9.0", {"vllm/core/planner.py": block("python")}, "")
    project.write_upstream()
    project.module("core/stage_planner.py")
    (project.topic("stage-planner") / "topic.toml").write_text(block("toml"))
    # The second document stands for "and so on".
    project.rules(block("yaml").partition("---\n")[0], target="core/planner.py", topic="stage-planner")
    return project


def test_example(example):
    (topic,) = example.topics()
    assert topic.modules == ("core/stage_planner.py",)
    outcome = series.apply(example.repo, [topic], WheelBase(example.cuda))
    assert b"        return stage_planner.plan(config)\n" in outcome.files["core/planner.py"][1]
    assert [str(problem) for done in outcome.edits for problem in nearmiss.problems(done)] == []
