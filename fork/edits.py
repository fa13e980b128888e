"""Applies the rules of one file to one text."""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from dataclasses import dataclass

from fork import astgrep
from fork.errors import (
    AstGrepError,
    CountMismatch,
    IdleRule,
    OverlappingEdits,
    ResultDoesNotCompile,
    SeriesFailed,
)
from fork.rules import RuleFile


@dataclass(frozen=True)
class FileEdit:
    """What one topic did to one file."""

    rule_file: RuleFile
    before: bytes
    after: bytes
    matches: tuple[astgrep.Match, ...]

    def lines_changed(self) -> tuple[int, int]:
        """Lines taken out and put in."""
        hunks = [hunk for match in self.matches for hunk in self.hunks(match)]
        return sum(removed for _, removed, _ in hunks), sum(len(added) for _, _, added in hunks)

    def hunks(self, match: astgrep.Match) -> list[tuple[int, int, list[str]]]:
        """What one match changes: upstream's line number, how many of its lines go, and the lines that come.

        Compared match by match: a whole-file diff of 6000 lines costs a second.
        """
        first = self.before.rfind(b"\n", 0, match.start) + 1
        last = self.before.find(b"\n", match.end)
        last = len(self.before) if last < 0 else last
        old = self.before[first:last].split(b"\n")
        new = (self.before[first : match.start] + match.replacement + self.before[match.end : last]).split(b"\n")
        line = self.before.count(b"\n", 0, first) + 1
        return [
            (line + i, j - i, [text.decode() for text in new[k:m]])
            for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
            if tag != "equal"
        ]


def find(rule_file: RuleFile, source: bytes, only: str | None = None) -> list[astgrep.Match]:
    try:
        return astgrep.scan(rule_file.text, source, only)
    except AstGrepError as error:
        raise AstGrepError(f"{rule_file.path}: {error}") from None


def edit(rule_file: RuleFile, source: bytes) -> FileEdit:
    """All rules see the same text, the one that earlier topics left; none sees another's replacement."""
    matches = find(rule_file, source)
    if wrong := count_problems(rule_file, matches):
        raise wrong[0] if len(wrong) == 1 else SeriesFailed(list(wrong))
    return splice(rule_file, source, matches)


def count_problems(rule_file: RuleFile, matches: list[astgrep.Match]) -> list[CountMismatch]:
    counts = Counter(match.rule for match in matches)
    return [
        CountMismatch(rule_file.topic, rule_file.target, rule.id, rule.count, counts[rule.id])
        for rule in rule_file.rules
        if counts[rule.id] != rule.count
    ]


def splice(rule_file: RuleFile, source: bytes, matches: list[astgrep.Match]) -> FileEdit:
    where = f"in {rule_file.target} (topic {rule_file.topic})"
    pieces, position, previous = [], 0, None
    for match in matches:
        if previous is not None and match.start < position:
            raise OverlappingEdits(
                f"rules {previous} and {match.rule} replace overlapping text {where}; make them one rule"
            )
        if source[match.start : match.end] == match.replacement:
            raise IdleRule(f"rule {match.rule} replaces text by itself {where}; the fix changes nothing")
        pieces += [source[position : match.start], match.replacement]
        position, previous = match.end, match.rule
    after = b"".join([*pieces, source[position:]])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's invalid escapes are not this check's business
            compile(after, rule_file.target, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        rules = ", ".join(dict.fromkeys(match.rule for match in matches))
        raise ResultDoesNotCompile(f"the result of {rules} {where} is not valid Python: {error}") from None
    return FileEdit(rule_file, source, after, tuple(matches))
