"""`fork rebase --onto`: what another upstream release would do to every rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fork import edits
from fork.base import Base
from fork.errors import ForkError
from fork.repo import Repo
from fork.rules import RuleFile
from fork.series import Outcome, attempt
from fork.topics import Topic

APPLIES, GONE, UPSTREAMED, COLLIDES = "applies", "target gone", "already upstream", "module exists upstream"


@dataclass(frozen=True)
class Verdict:
    topic: str
    file: str
    rule: str
    text: str

    @property
    def holds(self) -> bool:
        return self.text == APPLIES


def verdicts(repo: Repo, topics: list[Topic], pinned: Base, onto: Base) -> list[Verdict]:
    """One per rule and per added module that collides. A rule that fails does not hide those after it."""
    known = attempt(repo, topics, pinned)
    texts: dict[str, bytes | None] = {}
    found: list[Verdict] = []
    for topic in topics:
        for file in topic.rule_files:
            if file.target not in texts:
                texts[file.target] = onto.read(file.target)
            source = texts[file.target]
            if source is None:
                found += [Verdict(topic.name, file.target, rule.id, GONE) for rule in file.rules]
                continue
            some, texts[file.target] = _file(file, source, known)
            found += some
        found += [Verdict(topic.name, path, "-", COLLIDES) for path in topic.modules if onto.has(path)]
    return found


def _file(file: RuleFile, source: bytes, known: Outcome) -> tuple[list[Verdict], bytes]:
    """Verdicts, and the text that later topics' rules see: with the edits of those rules that hold."""
    matches = edits.find(file, source)
    counts = Counter(match.rule for match in matches)
    verdict = {}
    for rule in file.rules:
        if counts[rule.id] == rule.count:
            verdict[rule.id] = APPLIES
        elif counts[rule.id] == 0 and _present(rule.id, file, source, known):
            verdict[rule.id] = UPSTREAMED
        else:
            verdict[rule.id] = f"matches {counts[rule.id]}≠{rule.count}"
    kept = [match for match in matches if verdict[match.rule] == APPLIES]
    try:
        after = edits.splice(file, source, kept).after
    except ForkError as error:
        # Each matched as promised, yet together they give no file.
        verdict = {name: str(error) if text == APPLIES else text for name, text in verdict.items()}
        after = source
    return [Verdict(file.topic, file.target, rule.id, verdict[rule.id]) for rule in file.rules], after


def _present(rule: str, file: RuleFile, source: bytes, known: Outcome) -> bool:
    """Whether the text that the rule makes on the pinned release stands in the new file by itself.

    Text that the pinned file held before the edit proves nothing, and neither does an empty replacement.
    """
    for done in known.edits:
        if done.rule_file is file:
            made = [_folded(match.replacement) for match in done.matches if match.rule == rule]
            before, now = _folded(done.before), _folded(source)
            return bool(made) and all(text and text not in before and text in now for text in made)
    return False


def _folded(text: bytes) -> bytes:
    return b"".join(text.split())
