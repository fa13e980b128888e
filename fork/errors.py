"""Every way in which the tool refuses, one class each.

A message is one sentence that says what was expected, what was found, and what to do. Callers that print
(the command line, the build backend) catch `ForkError` and nothing wider, so that a defect of the tool itself
still shows its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MIB = 1 << 20


def listed(names: Iterable[str], limit: int = 10) -> str:
    """`a, b, c` or `a, b and 7 more`: long lists would bury the sentence around them."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class ForkError(Exception):
    """Base of everything below."""


# --- what the repository says -----------------------------------------------------------------------------


class UpstreamFileError(ForkError):
    """upstream.toml is missing, unreadable, or lacks a key."""


class FlavourError(ForkError):
    """VLLM_TARGET_DEVICE or --flavour names something else than a flavour of upstream.toml."""


class TopicError(ForkError):
    """patches/series or a topic folder is not what it has to be."""


class OwnershipError(ForkError):
    """A file under vllm/ belongs to no topic, or to two."""


class RuleFormatError(ForkError):
    """A rule file does not hold plain ast-grep rules with our metadata."""


# --- applying rules ---------------------------------------------------------------------------------------


class AstGrepError(ForkError):
    """ast-grep is missing, or refused the rules."""


class CountMismatch(ForkError):
    """A rule matched another number of times than it promises."""

    def __init__(self, topic: str, target: str, rule: str, expected: int, actual: int) -> None:
        super().__init__(
            f"rule {rule} of topic {topic} matches {actual} times in {target}, expected {expected}; nothing was written"
        )
        self.rule, self.expected, self.actual = rule, expected, actual


class TargetGone(ForkError):
    """A rule file names an upstream file that the base does not have."""


class OverlappingEdits(ForkError):
    """Two replacements touch the same bytes, so their order would decide the result."""


class IdleRule(ForkError):
    """A rule matched, and its replacement is what stood there."""


class ResultDoesNotCompile(ForkError):
    """The edited file is not valid Python."""


class ModuleCollision(ForkError):
    """A module that we add exists upstream."""


class SeriesFailed(ForkError):
    """Several of the above at once; `problems` holds them."""

    def __init__(self, problems: list[ForkError]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class NearMissError(ForkError):
    """A rule's near miss matches, does not parse, or is not near."""


# --- getting the upstream wheels --------------------------------------------------------------------------


class WrongHash(ForkError):
    """A wheel is not the file that upstream.toml names."""

    def __init__(self, file: Path | str, expected: str, actual: str) -> None:
        super().__init__(
            f"{file} has sha256 {actual}, expected {expected} (upstream.toml); delete it and fetch again, "
            "and if it stays so the index serves another file"
        )
        self.expected, self.actual = expected, actual


class DiskFull(ForkError):
    """Not enough room, seen beforehand or met while writing."""

    def __init__(self, folder: Path | str, what: str, needed: int | None, free: int) -> None:
        wanted = "more" if needed is None else f"{needed / MIB:.0f} MiB"
        super().__init__(
            f"{what} needs {wanted} in {folder}, where {free / MIB:.0f} MiB are free; make room and repeat"
        )


class NotWritable(ForkError):
    """A folder that has to be written belongs to somebody else, or is mounted read-only."""


class DownloadFailed(ForkError):
    """pip could not reach the index, or the index has no such wheel."""


class BadWheel(ForkError):
    """A wheel lacks a part that every wheel has."""


class UndecidedRequirement(ForkError):
    """The release requires something of which nobody has said whether this flavour needs it."""


# --- writing trees ----------------------------------------------------------------------------------------


class NotOurTree(ForkError):
    """The folder exists and was not written by `fork apply` (or is not empty, for `fork branch`)."""


class EditedByHand(ForkError):
    """Files were changed since the tool wrote them."""

    def __init__(self, place: Path | str, paths: Iterable[str]) -> None:
        paths = sorted(paths)
        super().__init__(
            f"{place} was changed by hand since it was written ({listed(paths)}); move the change into vllm/ or "
            "patches/, or repeat with --force to drop it"
        )
        self.paths = paths


class GitFailed(ForkError):
    """git refused while a branch was written."""


# --- the installed package --------------------------------------------------------------------------------


class NotInstalled(ForkError):
    """The running interpreter has no vllm that could be edited in place."""


class WrongRelease(ForkError):
    """The installed vllm is not the pinned release."""


class TargetDiffers(ForkError):
    """An installed file is not byte for byte the pinned release's."""


class NotApplied(ForkError):
    """--revert without a manifest to revert from."""


class StaleFile(ForkError):
    """A generated file of the repository is not what the topics would generate."""
