"""Applies the whole series to a base, in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from fork import edits
from fork.base import Base
from fork.errors import ForkError, ModuleCollision, SeriesFailed, TargetGone
from fork.repo import Repo
from fork.rules import RuleFile
from fork.topics import Topic


@dataclass
class Outcome:
    """`files` maps a path to upstream's text and to ours; `added` maps a path to the module in the repository."""

    files: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    edits: list[edits.FileEdit] = field(default_factory=list)
    added: dict[str, Path] = field(default_factory=dict)
    problems: list[ForkError] = field(default_factory=list)

    def current(self, path: str, base: Base) -> bytes | None:
        return self.files[path][1] if path in self.files else base.read(path)


def apply(repo: Repo, topics: list[Topic], base: Base) -> Outcome:
    """The outcome, or an error with everything that is wrong; a caller never sees half a series."""
    outcome = attempt(repo, topics, base)
    if outcome.problems:
        raise outcome.problems[0] if len(outcome.problems) == 1 else SeriesFailed(outcome.problems)
    return outcome


def attempt(repo: Repo, topics: list[Topic], base: Base) -> Outcome:
    outcome = Outcome()
    for topic in topics:
        for rule_file in topic.rule_files:
            try:
                _edit(rule_file, base, outcome)
            except SeriesFailed as error:
                outcome.problems += error.problems
            except ForkError as error:
                outcome.problems.append(error)
        for path in topic.modules:
            if base.has(path):
                outcome.problems.append(collision(topic, path, base))
            outcome.added[path] = repo.modules / path
    return outcome


def collision(topic: Topic, path: str, base: Base) -> ModuleCollision:
    return ModuleCollision(
        f"topic {topic.name} adds vllm/{path}, and {base.name} has that file; rename ours or edit theirs"
    )


def _edit(rule_file: RuleFile, base: Base, outcome: Outcome) -> None:
    source = outcome.current(rule_file.target, base)
    if source is None:
        raise TargetGone(f"{rule_file.path} edits {rule_file.target}, which {base.name} does not have")
    done = edits.edit(rule_file, source)
    original = outcome.files.get(rule_file.target, (source, source))[0]
    outcome.files[rule_file.target] = (original, done.after)
    outcome.edits.append(done)


def digest(topics: list[Topic]) -> str:
    """Names one state of the rules, in manifests."""
    state = [[topic.name, [[file.target, file.text] for file in topic.rule_files], topic.modules] for topic in topics]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()
