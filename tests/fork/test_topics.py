"""patches/series, topic.toml, and who owns which module."""

from __future__ import annotations

import pytest

from fork import topics
from fork.errors import TopicError


def problems(project):
    return [str(problem) for problem in topics.problems(project.repo, project.topics())]


def test_order_and_comments(project):
    project.topic("b")
    project.topic("a")
    project.repo.series.write_text("# first things first\nb  # before a\n\na\n")
    assert [topic.name for topic in project.topics()] == ["b", "a"]


def test_adds_expand_files_folders_and_globs(project):
    for path in ("a.py", "d/b.py", "d/e/c.md", "f/one.py", "f/two.py"):
        project.module(path)
    (project.module("d/__pycache__/b.cpython-311.pyc"))
    project.topic(adds=("a.py", "d/", "f/o*.py"))
    assert project.topics()[0].modules == ("a.py", "d/b.py", "d/e/c.md", "f/one.py")
    assert problems(project) == ["vllm/f/two.py belongs to no topic; name it in the `adds` of one topic.toml"]


def test_module_of_two_topics(project):
    project.module()
    project.topic("a", adds=("core",))
    project.topic("b", adds=("core/ours.py",))
    (problem,) = problems(project)
    assert "vllm/core/ours.py belongs to a and b" in problem


def test_folder_outside_the_series(project):
    project.topic("forgotten", listed=False)
    assert problems(project) == ["patches/forgotten is not listed in patches/series, so it is never applied"]


def refuse(project, message):
    with pytest.raises(TopicError, match=message):
        project.topics()


def test_series_names_a_topic_without_folder(project):
    project.repo.series.write_text("ghost\n")
    refuse(project, "lists ghost, and .*topic.toml does not exist")


def test_series_missing(project):
    project.repo.series.unlink()
    refuse(project, "series does not exist")


def test_series_lists_a_topic_twice(forked):
    forked.repo.series.write_text("stages\nstages\n")
    refuse(forked, "stages twice")


def test_adds_that_hit_nothing(project):
    project.topic(adds=("core/typo.py",))
    refuse(project, "adds 'core/typo.py', and nothing")


def test_unknown_and_missing_keys(project):
    about = project.topic() / "topic.toml"
    text = about.read_text()
    about.write_text(text + 'owner = "me"\n')
    refuse(project, "has owner")
    about.write_text(text.replace("why", "reason"))
    refuse(project, "has reason")
    about.write_text("\n".join(line for line in text.splitlines() if not line.startswith("why")))
    refuse(project, "lacks why")
    about.write_text("title = \n")
    refuse(project, "not TOML")


def test_stray_file_in_a_topic(project):
    (project.topic() / "planning.py.yaml").write_text("")
    refuse(project, "neither topic.toml nor")


def test_rule_ids_are_unique(forked, rule):
    forked.topic("later")
    forked.rules(rule("stages-guard", "a", "b"), topic="later", target="core/table.py")
    refuse(forked, "stages-guard occur twice")
