"""Where things lie in this repository. Tests point it at small ones of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Repo:
    root: Path

    @property
    def upstream_toml(self) -> Path:
        return self.root / "upstream.toml"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def series(self) -> Path:
        return self.patches / "series"

    @property
    def targets(self) -> Path:
        """Hashes of the upstream files that we edit, so that an image build needs no wheel to compare with."""
        return self.patches / "targets.json"

    @property
    def modules(self) -> Path:
        return self.root / "vllm"

    @property
    def page(self) -> Path:
        return self.root / "docs" / "ampere-multigpu" / "patches.md"

    def tree(self, flavour: str) -> Path:
        """What an editable install imports."""
        return self.root / "build" / flavour


HERE = Repo(Path(__file__).resolve().parent.parent)
