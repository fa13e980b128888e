"""Near misses: a rule proves that it tells its target from something like it.

A pattern that is too wide still has the right count on the pinned release, and shows on the next one, as an edit
in the wrong place. A near miss makes the narrowness part of the rule.
"""

from __future__ import annotations

import ast
import difflib
import re

from fork import edits
from fork.errors import ForkError, NearMissError
from fork.rules import Rule, RuleFile

# Half of the tokens in common and in order: below that, snippets resembled their target in name only.
NEAR = 0.5
_TOKEN = re.compile(r"\w+|[^\w\s]")


def problems(done: edits.FileEdit) -> list[ForkError]:
    found: list[ForkError] = []
    for rule in done.rule_file.rules:
        texts = [match.text for match in done.matches if match.rule == rule.id]
        try:
            _check(done.rule_file, rule, texts)
        except ForkError as error:
            found.append(error)
    return found


def _check(rule_file: RuleFile, rule: Rule, texts: list[str]) -> None:
    name = f"{rule_file.path}: the near miss of rule {rule.id}"
    try:
        ast.parse(rule.near_miss)
    except SyntaxError as error:
        raise NearMissError(f"{name} is not valid Python: {error}") from None
    if hits := edits.find(rule_file, rule.near_miss.encode(), only=rule.id):
        raise NearMissError(f"{name} is matched {len(hits)} times, expected 0; narrow the rule")
    closest = max((similarity(text, rule.near_miss) for text in texts), default=0.0)
    if closest < NEAR:
        raise NearMissError(f"{name} resembles its target by {closest:.2f}, expected at least {NEAR}; bring it nearer")


def similarity(target: str, snippet: str) -> float:
    """Of the target's tokens and the best window of that length: context around the snippet costs nothing."""
    want, have = _TOKEN.findall(target), _TOKEN.findall(snippet)
    width = max(len(want), 1)
    starts = range(max(len(have) - width, 0) + 1)
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(want)  # the side that SequenceMatcher indexes once
    best = 0.0
    for start in starts:
        matcher.set_seq1(have[start : start + width])
        if matcher.quick_ratio() > best:
            best = max(best, matcher.ratio())
    return best
