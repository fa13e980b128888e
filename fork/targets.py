"""patches/targets.json: sha256 of every upstream file that the series edits, as the pinned release has it.

An image build compares the installed files with these, and needs no 336 MB wheel for it.
"""

from __future__ import annotations

import json

from fork.disk import sha256
from fork.errors import StaleFile
from fork.repo import Repo
from fork.series import Outcome

REFRESH = "run `python -m fork check --write`"


def text(outcome: Outcome) -> str:
    hashes = {path: sha256(before) for path, (before, _) in sorted(outcome.files.items())}
    return json.dumps(hashes, indent=1) + "\n"


def load(repo: Repo) -> dict[str, str]:
    try:
        return json.loads(repo.targets.read_text("utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise StaleFile(f"{repo.targets} cannot be read ({error}); {REFRESH}") from None
