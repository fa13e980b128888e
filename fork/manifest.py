"""fork-manifest.json: what stands in a written tree, so that the next command can tell our bytes from anybody's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fork.errors import NotOurTree

NAME = "fork-manifest.json"
FORMAT = 1


@dataclass
class Manifest:
    """`edited` and `generated` hold sha256 before and after; `added` the sha256, or the place it is linked to."""

    release: str
    version: str
    flavour: str
    series: str
    wheels: dict[str, str]
    edited: dict[str, dict] = field(default_factory=dict)
    generated: dict[str, dict] = field(default_factory=dict)
    added: dict[str, dict] = field(default_factory=dict)
    format: int = FORMAT

    def touched(self) -> set[str]:
        return self.edited.keys() | self.generated.keys() | self.added.keys()

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read(path: Path) -> Manifest:
    try:
        return Manifest(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise NotOurTree(
            f"{path.parent} was not written by `fork apply` (no {path.name}); name an empty or new folder"
        ) from None
    except (ValueError, TypeError) as error:
        raise NotOurTree(f"{path} cannot be read: {error}; remove the folder and apply again") from None
