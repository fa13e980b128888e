"""A rule file: plain ast-grep rules for one upstream file, with the metadata that we insist on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from fork.errors import RuleFormatError

# ast-grep ignores keys that it does not know, so a typing error in one would go unseen. Left out on purpose:
# `severity` and `files`, which change what is reported or where, behind our counting.
KEYS = {"id", "language", "message", "note", "rule", "fix", "metadata", "constraints", "utils", "transform"}
REQUIRED = ("id", "language", "message", "note", "rule", "fix", "metadata")


@dataclass(frozen=True)
class Rule:
    id: str
    message: str
    note: str
    count: int
    near_miss: str


@dataclass(frozen=True)
class RuleFile:
    """`path` in the repository, `target` relative to upstream's vllm/ folder."""

    topic: str
    target: str
    path: Path
    text: str
    rules: tuple[Rule, ...]

    def rule(self, identifier: str) -> Rule:
        return next(rule for rule in self.rules if rule.id == identifier)


def load(path: Path, topic: str, target: str) -> RuleFile:
    text = path.read_text("utf-8")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise RuleFormatError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not documents:
        raise RuleFormatError(f"{path} holds no rule; remove it or write one")
    rules = tuple(_rule(path, document) for document in documents)
    return RuleFile(topic, target, path, text, rules)


def _rule(path: Path, document: object) -> Rule:
    if not isinstance(document, dict):
        raise RuleFormatError(f"{path} has a document that is not a mapping")
    name = f"{path}: rule {document.get('id', '(without id)')}"
    if missing := [key for key in REQUIRED if key not in document]:
        raise RuleFormatError(f"{name} lacks {', '.join(missing)}")
    if unknown := sorted(document.keys() - KEYS):
        raise RuleFormatError(
            f"{name} has {', '.join(map(str, unknown))}, and only {', '.join(sorted(KEYS))} are allowed"
        )
    if document["language"] != "Python":
        raise RuleFormatError(f"{name} has language {document['language']!r}, and targets are Python files")
    for key in ("id", "message", "note"):
        if not isinstance(document[key], str) or not document[key].strip():
            raise RuleFormatError(f"{name} has an empty {key}")
    metadata = document["metadata"]
    if not isinstance(metadata, dict):
        raise RuleFormatError(f"{name} has metadata other than a mapping with count and near_miss")
    if odd := sorted(metadata.keys() - {"count", "near_miss"}):
        raise RuleFormatError(
            f"{name} has {', '.join(map(str, odd))} in metadata, which holds count and near_miss only"
        )
    count = metadata.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RuleFormatError(f"{name} has count {count!r}, expected a number from 1")
    near_miss = metadata.get("near_miss")
    if not isinstance(near_miss, str) or not near_miss.strip():
        raise RuleFormatError(
            f"{name} lacks metadata.near_miss, a snippet that resembles the target and must not match"
        )
    return Rule(document["id"], document["message"].strip(), document["note"].strip(), count, near_miss)
