"""patches/series and the topic folders, with the modules under vllm/ that each topic adds."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fork import rules
from fork.errors import ForkError, OwnershipError, TopicError, listed
from fork.repo import Repo

TEXTS = ("title", "why", "status", "drop_when")
KEYS = {*TEXTS, "upstream", "adds"}


@dataclass(frozen=True)
class Topic:
    name: str
    title: str
    why: str
    status: str
    drop_when: str
    upstream: tuple[str, ...]
    adds: tuple[str, ...]
    rule_files: tuple[rules.RuleFile, ...]
    modules: tuple[str, ...]  # relative to vllm/, expanded from `adds`


def names(repo: Repo) -> list[str]:
    """Topics in order of application."""
    try:
        lines = repo.series.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise TopicError(f"{repo.series} does not exist; it lists the topics in order of application") from None
    found = [name for line in lines if (name := line.partition("#")[0].strip())]
    if twice := [name for name, count in Counter(found).items() if count > 1]:
        raise TopicError(f"{repo.series} lists {listed(twice)} twice")
    return found


def load_all(repo: Repo) -> list[Topic]:
    """Every topic of the series. What a topic claims must exist; what nobody claims is `problems`' business."""
    files = module_files(repo)
    topics = [_load(repo, name, files) for name in names(repo)]
    ids = Counter(rule.id for topic in topics for file in topic.rule_files for rule in file.rules)
    if twice := [identifier for identifier, count in ids.items() if count > 1]:
        raise TopicError(f"rule ids must be unique in the repository, and {listed(twice)} occur twice")
    return topics


def problems(repo: Repo, topics: list[Topic]) -> list[ForkError]:
    """Folders outside the series, and modules that do not belong to exactly one topic."""
    found: list[ForkError] = []
    listed_names = {topic.name for topic in topics}
    for folder in sorted(path for path in repo.patches.iterdir() if path.is_dir()):
        if folder.name not in listed_names:
            found.append(TopicError(f"patches/{folder.name} is not listed in patches/series, so it is never applied"))
    owners: dict[str, list[str]] = {path: [] for path in module_files(repo)}
    for topic in topics:
        for path in topic.modules:
            owners[path].append(topic.name)
    for path, who in owners.items():
        if not who:
            found.append(OwnershipError(f"vllm/{path} belongs to no topic; name it in the `adds` of one topic.toml"))
        elif len(who) > 1:
            found.append(OwnershipError(f"vllm/{path} belongs to {' and '.join(who)}; keep it in one `adds`"))
    return found


def module_files(repo: Repo) -> list[str]:
    """Files under vllm/, relative to it. Python's caches are not ours to ship."""
    if not repo.modules.is_dir():
        return []
    found = (path for path in repo.modules.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sorted(path.relative_to(repo.modules).as_posix() for path in found)


def _load(repo: Repo, name: str, files: list[str]) -> Topic:
    folder = repo.patches / name
    about = folder / "topic.toml"
    if not about.is_file():
        raise TopicError(f"patches/series lists {name}, and {about} does not exist")
    try:
        data = tomllib.loads(about.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TopicError(f"{about} is not TOML: {error}") from None
    if unknown := sorted(data.keys() - KEYS):
        raise TopicError(f"{about} has {listed(unknown)}, and only {listed(sorted(KEYS))} are known")
    for key in TEXTS:
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise TopicError(f"{about} lacks {key}")
    for key in ("upstream", "adds"):
        if not all(isinstance(entry, str) for entry in data.get(key, [])):
            raise TopicError(f"{about} has an entry in {key} that is not text")
    adds = tuple(data.get("adds", ()))
    return Topic(
        name=name,
        upstream=tuple(data.get("upstream", ())),
        adds=adds,
        rule_files=_rule_files(folder),
        modules=_expand(about, adds, files),
        **{key: data[key].strip() for key in TEXTS},
    )


def _rule_files(folder: Path) -> tuple[rules.RuleFile, ...]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path == folder / "topic.toml":
            continue
        target = path.relative_to(folder).as_posix().removesuffix(".yml")
        if path.suffix != ".yml" or not target.endswith(".py"):
            raise TopicError(f"{path} is neither topic.toml nor <upstream path>.py.yml")
        found.append(rules.load(path, folder.name, target))
    return tuple(found)


def _expand(about: Path, adds: tuple[str, ...], files: list[str]) -> tuple[str, ...]:
    taken: dict[str, None] = {}
    for entry in adds:
        pattern = entry.removesuffix("/")
        hits = [path for path in files if path.startswith(f"{pattern}/") or fnmatchcase(path, pattern)]
        if not hits:
            raise TopicError(f"{about} adds {entry!r}, and nothing under vllm/ has that path")
        taken.update(dict.fromkeys(hits))
    return tuple(taken)
