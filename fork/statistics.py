"""How much of upstream a topic touches. Few lines in upstream files is what we aim at, so it is counted."""

from __future__ import annotations

from dataclasses import dataclass

from fork.repo import Repo
from fork.series import Outcome
from fork.topics import Topic

HEAD = ("topic", "files edited", "rules", "upstream −", "upstream +", "our lines")


@dataclass(frozen=True)
class Row:
    topic: str
    files: int
    rules: int
    removed: int
    added: int
    own: int

    def cells(self) -> tuple:
        return (self.topic, self.files, self.rules, self.removed, self.added, self.own)


def row(repo: Repo, topic: Topic, outcome: Outcome) -> Row:
    done = [edit for edit in outcome.edits if edit.rule_file.topic == topic.name]
    changed = [edit.lines_changed() for edit in done]
    own = sum((repo.modules / path).read_bytes().count(b"\n") for path in topic.modules)
    rules = sum(len(file.rules) for file in topic.rule_files)
    return Row(topic.name, len(topic.rule_files), rules, sum(c[0] for c in changed), sum(c[1] for c in changed), own)


def total(rows: list[Row], outcome: Outcome) -> Row:
    """Files are counted once here, though several topics may edit one."""
    sums = [sum(getattr(row, name) for row in rows) for name in ("rules", "removed", "added", "own")]
    return Row("total", len(outcome.files), *sums)
