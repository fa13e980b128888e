"""upstream.toml, parsed and validated once."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from fork.errors import UpstreamFileError


@dataclass(frozen=True)
class Wheel:
    project: str
    version: str
    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Source:
    """The members that one wheel contributes to a flavour's tree."""

    wheel: str
    take: tuple[str, ...]
    leave: tuple[str, ...] = ()

    def wants(self, member: str) -> bool:
        return any(fnmatchcase(member, p) for p in self.take) and not any(fnmatchcase(member, p) for p in self.leave)


@dataclass(frozen=True)
class Flavour:
    name: str
    metadata: str
    sources: tuple[Source, ...]
    compiled_metadata: str | None = None
    pins: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def wheel_keys(self) -> list[str]:
        keys = [source.wheel for source in self.sources] + [self.metadata, self.compiled_metadata]
        return list(dict.fromkeys(key for key in keys if key))


@dataclass(frozen=True)
class Upstream:
    version: str
    fork: int
    bases: tuple[str, ...]
    wheels: dict[str, Wheel] = field(default_factory=dict)
    flavours: dict[str, Flavour] = field(default_factory=dict)

    def our_version(self, flavour: str) -> str:
        """vLLM picks its CPU platform by finding "cpu" in the distribution's version, so ours has to carry it."""
        return f"{self.version}+ampere.{self.fork}" + (".cpu" if flavour == "cpu" else "")


def load(path: Path) -> Upstream:
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UpstreamFileError(f"{path} does not exist; run this from a checkout of the fork") from None
    except tomllib.TOMLDecodeError as error:
        raise UpstreamFileError(f"{path} is not TOML: {error}") from None
    try:
        wheels = {key: Wheel(**entry) for key, entry in data["wheels"].items()}
        flavours = {name: _flavour(name, entry) for name, entry in data["flavours"].items()}
        upstream = Upstream(data["version"], data["fork"], tuple(data["bases"]), wheels, flavours)
    except (KeyError, TypeError, AttributeError) as error:
        raise UpstreamFileError(f"{path} lacks an entry or has one too many: {error}") from None
    used = {key for flavour in flavours.values() for key in flavour.wheel_keys()} | set(upstream.bases)
    if missing := used - wheels.keys():
        raise UpstreamFileError(f"{path} uses wheels that it does not describe: {', '.join(sorted(missing))}")
    return upstream


def _flavour(name: str, entry: dict) -> Flavour:
    sources = tuple(
        Source(source["wheel"], tuple(source["take"]), tuple(source.get("leave", ()))) for source in entry["sources"]
    )
    return Flavour(
        name,
        entry["metadata"],
        sources,
        entry.get("compiled_metadata"),
        tuple(entry.get("pins", ())),
        tuple(entry.get("adds", ())),
        tuple(entry.get("drop", ())),
    )
