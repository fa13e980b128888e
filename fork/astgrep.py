"""One call of ast-grep: rules and a source text in, replacements out.

ast-grep finds and computes; it never writes. Its `--update-all` knows no expected count and no order of topics.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fork.errors import AstGrepError


@dataclass(frozen=True)
class Match:
    """A match of one rule. Offsets are bytes, and those of the part that is replaced (a `fix` with expandStart
    or expandEnd reaches beyond what was matched)."""

    rule: str
    text: str
    start: int
    end: int
    replacement: bytes


@cache
def executable() -> str:
    """The binary of this interpreter's own ast-grep-cli, else the one on PATH.

    An isolated build has its scripts outside sys.prefix, so only the distribution's file list knows the place.
    """
    try:
        for file in importlib.metadata.distribution("ast-grep-cli").files or ():
            if Path(file.name).stem == "ast-grep" and (found := Path(file.locate())).is_file():
                return str(found)
    except importlib.metadata.PackageNotFoundError:
        pass
    if found := shutil.which("ast-grep"):
        return found
    raise AstGrepError("ast-grep is not installed here; `pip install ast-grep-cli` into this environment")


def scan(rules: str, source: bytes, only: str | None = None) -> list[Match]:
    """All matches of the rules (a multi-document YAML text) in a Python source, in order of position."""
    command = [executable(), "scan", "--inline-rules", rules, "--json=stream", "--stdin"]
    if only is not None:
        command += ["--filter", f"^{only}$"]
    # cwd: a sgconfig.yml of whatever folder the caller stands in must not add rules of its own.
    done = subprocess.run(command, input=source, capture_output=True, cwd="/", check=False)
    if done.returncode != 0:
        raise AstGrepError(f"ast-grep refused the rules: {' '.join(done.stderr.decode('utf-8', 'replace').split())}")
    matches = [_match(json.loads(line)) for line in done.stdout.splitlines() if line.strip()]
    return sorted(matches, key=lambda match: (match.start, match.end))


def _match(found: dict) -> Match:
    where = found.get("replacementOffsets") or found["range"]["byteOffset"]
    replacement = found.get("replacement", found["text"])
    return Match(found["ruleId"], found["text"], where["start"], where["end"], replacement.encode())
