"""`fork check`: everything that can be known about the series without running vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from fork import fetch, nearmiss, page, series, statistics, table, targets, topics
from fork import upstream as upstream_file
from fork.base import WheelBase
from fork.errors import ForkError, ResultDoesNotCompile, StaleFile
from fork.repo import Repo
from fork.upstream import Upstream


@dataclass
class Report:
    table: str
    problems: list[ForkError]


def run(repo: Repo, write: bool = False) -> Report:
    upstream = upstream_file.load(repo.upstream_toml)
    series_topics = topics.load_all(repo)
    problems = topics.problems(repo, series_topics)
    outcomes = []
    for key in upstream.bases:
        base = WheelBase(fetch.ensure(upstream, [key])[key])
        outcomes.append(series.attempt(repo, series_topics, base))
        problems += outcomes[-1].problems
    # The first base is the pinned release; counts, near misses and pages speak of it.
    pinned = outcomes[0]
    for done in pinned.edits:
        problems += nearmiss.problems(done)
    problems += _modules(pinned)
    if not pinned.problems:
        problems += _generated(repo, upstream, series_topics, pinned, write)
    rows = [statistics.row(repo, topic, pinned) for topic in series_topics]
    rows.append(statistics.total(rows, pinned))
    text = table.text(statistics.HEAD, [row.cells() for row in rows], right=frozenset(range(1, 6)))
    return Report(text, problems)


def _modules(outcome: series.Outcome) -> list[ForkError]:
    found: list[ForkError] = []
    for path, file in outcome.added.items():
        if path.endswith(".py"):
            try:
                compile(file.read_bytes(), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                found.append(ResultDoesNotCompile(f"vllm/{path} is not valid Python: {error}"))
    return found


def _generated(
    repo: Repo, upstream: Upstream, series_topics: list[topics.Topic], outcome: series.Outcome, write: bool
) -> list[ForkError]:
    found: list[ForkError] = []
    wanted = {repo.targets: targets.text(outcome), repo.page: page.text(repo, upstream, series_topics, outcome)}
    for path, text in wanted.items():
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            found.append(StaleFile(f"{path} is not what the topics generate; {targets.REFRESH}"))
    return found
