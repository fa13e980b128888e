"""Everything a forked tree consists of, computed before the first byte is written."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from fork import fetch, flavour, release, series, topics
from fork import upstream as upstream_file
from fork.base import PACKAGE, WheelBase, open_wheel
from fork.disk import sha256
from fork.manifest import Manifest
from fork.repo import Repo
from fork.upstream import Flavour, Upstream


@dataclass
class Sources:
    """A flavour with its wheels at hand; enough for metadata, before any rule is applied."""

    upstream: Upstream
    flavour: Flavour
    wheels: dict[str, Path]

    @property
    def version(self) -> str:
        return self.upstream.our_version(self.flavour.name)


@dataclass
class Plan(Sources):
    topics: list[topics.Topic]
    outcome: series.Outcome
    generated: dict[str, bytes]
    base: WheelBase

    def members(self) -> dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
        """Upstream's part of the tree, by path. A later source of the flavour wins, as upstream.toml orders them."""
        found = {}
        for source in self.flavour.sources:
            archive = open_wheel(self.wheels[source.wheel])
            for info in archive.infolist():
                if source.wants(info.filename) and not info.is_dir():
                    found[info.filename.removeprefix(PACKAGE)] = (archive, info)
        return found

    def contents(self) -> dict[str, bytes]:
        """Edited and generated files."""
        return {path: after for path, (_, after) in self.outcome.files.items()} | self.generated

    def manifest(self, link: bool) -> Manifest:
        edited = {}
        for path, (before, after) in self.outcome.files.items():
            names = [edit.rule_file.topic for edit in self.outcome.edits if edit.rule_file.target == path]
            edited[path] = {"before": sha256(before), "after": sha256(after), "topics": names}
        generated = {}
        for path, after in self.generated.items():
            before = self.base.read(path)
            generated[path] = {"before": before and sha256(before), "after": sha256(after)}
        # A linked module is meant to change under the tree, so its hash would say nothing.
        added = {
            path: {"link": str(file)} if link else {"after": sha256(file.read_bytes())}
            for path, file in self.outcome.added.items()
        }
        return Manifest(
            release=self.upstream.version,
            version=self.version,
            flavour=self.flavour.name,
            series=series.digest(self.topics),
            wheels={self.upstream.wheels[key].file: self.upstream.wheels[key].sha256 for key in self.wheels},
            edited=edited,
            generated=generated,
            added=added,
        )


def sources(repo: Repo, asked: str | None = None) -> Sources:
    upstream = upstream_file.load(repo.upstream_toml)
    chosen = flavour.choose(upstream, asked)
    return Sources(upstream, chosen, fetch.ensure(upstream, chosen.wheel_keys()))


def make(repo: Repo, asked: str | None = None) -> Plan:
    # Rules are read before wheels are fetched: a typing error should not cost a download first.
    series_topics = topics.load_all(repo)
    found = sources(repo, asked)
    base = WheelBase(found.wheels[found.flavour.metadata])
    outcome = series.apply(repo, series_topics, base)
    generated = {release.PATH: release.text(found.version)}
    return Plan(found.upstream, found.flavour, found.wheels, series_topics, outcome, generated, base)
