"""One measurement as a JSON file: where and of what it was taken, every sample, and what it claims.

Files lie in docs/ampere-multigpu/benches/ and are named after a subject, `pipeline-…`, `ple-…`.  Tables in the pages
are made from them (benchmarks/figures.py), so no figure in a page can be older than its file.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/ampere-multigpu/benches"
SUBJECTS = ("formats", "qsa", "ple", "host-kv", "pipeline")


@dataclass(frozen=True)
class Claim:
    """A measured value beside the one that was aimed at; `compare` is `>=` or `<=`."""

    name: str
    value: float
    unit: str
    aim: float
    compare: str

    def __post_init__(self) -> None:
        if self.compare not in (">=", "<="):
            raise ValueError(f"claim {self.name!r} compares with {self.compare!r}, expected '>=' or '<='")

    @property
    def holds(self) -> bool:
        return self.value >= self.aim if self.compare == ">=" else self.value <= self.aim


def write(
    path: Path,
    settings: dict,
    samples: Sequence[dict],
    claims: Sequence[Claim],
    gpus: str | None = None,
    elsewhere: dict | None = None,
    measured: str | None = None,
) -> None:
    """Write a record.

    Args:
        path: its name begins with one of SUBJECTS
        settings: whatever someone needs to repeat it
        samples: every one that was taken, none left out
        claims: what the samples are said to show
        gpus: e.g. "2 x NVIDIA H200"; None for a run without
        elsewhere: `hardware()` of the machine that measured, where it is not this one
        measured: the commit that was measured; None asks git, which a machine that only got the files does not have
    """
    if not path.name.startswith(tuple(f"{subject}-" for subject in SUBJECTS)) or path.suffix != ".json":
        raise ValueError(f"{path.name} is not <subject>-<name>.json with a subject of {', '.join(SUBJECTS)}")
    upstream = tomllib.loads((ROOT / "upstream.toml").read_text())
    record = {
        "taken": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": measured or commit(),
        "upstream": f"vllm {upstream['version']}",
        "hardware": (elsewhere or hardware()) | ({"gpus": gpus} if gpus else {}),
        "settings": settings,
        "samples": list(samples),
        "claims": [asdict(claim) for claim in claims],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def named(path: Path, name: str) -> Path:
    """Of a run whose cases are in no other record: `path` itself, or with a name the one that stands beside it."""
    return path.with_stem(f"{path.stem}-{name}") if name else path


def every(pattern: str) -> list[dict]:
    """The records of a pattern, one before those that stand beside it."""
    return [read(path) for path in sorted(FOLDER.glob(pattern), key=lambda path: path.stem)]


def beside(record: dict) -> str:
    """ ", beside …" for a page: what else the machine ran; empty where nothing is known."""
    found = record["hardware"].get("beside")
    return f", beside {found}" if found else ""


def measured_on(record: dict) -> str:
    """How a table of a page begins: the card or the processor, the base, the commit and what ran beside."""
    where = record["hardware"]
    return f"Measured on {where.get('gpus', where['cpu'])} ({record['upstream']}, commit {record['commit']})" + beside(
        record
    )


def commit() -> str:
    """The commit that was measured; `+` behind it means that tracked files had been changed since."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if changed.strip() else "")


def hardware() -> dict:
    """The machine; `beside` is what else ran on it meanwhile, by whoever started it (BENCHMARK_BESIDE)."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {"cpu": model, "cores": len(os.sched_getaffinity(0)), "ram_gib": round(pages / 2**30, 1)}
    beside = os.environ.get("BENCHMARK_BESIDE")
    return found | ({"beside": beside} if beside else {})
