"""Small tables in the published layouts, written with safetensors."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.table_formats import encode
from vllm.models.qwen4_exp.ple_store import staging
from vllm.models.qwen4_exp.ple_store.formats import Table, locate_table
from vllm.models.qwen4_exp.ple_store.locate import TableLocation, TableShape

LAYER = "layers.1.ple.ple_embedding.ngram_embedding"
PREFIX = "model.language_model."


@dataclass
class Written:
    """A table on disk: ``values`` is what its rows ``[rows, dim]`` mean, ``files`` in the order of shards."""

    folder: Path
    values: torch.Tensor
    shape: TableShape
    files: list[Path]

    def table(self, **changes: object) -> Table:
        return locate_table(self.folder, LAYER, TableShape(**{**self.shape.__dict__, **changes}))

    def locate(self, **changes: object) -> TableLocation:
        """Its rows."""
        return self.table(**changes).rows

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The layer's tensors as the loader hands them to ``Qwen4ExpNGramEmbedding``."""
        for path in self.files:
            for name, tensor in load_file(path).items():
                if LAYER in name:
                    yield "ngram_embedding." + name.split("ngram_embedding.")[1], tensor


@pytest.fixture(autouse=True)
def unpublished(monkeypatch):
    """Tests build layers outside of any group of ranks; ``test_metrics.py`` publishes on its own."""
    monkeypatch.setattr(staging, "publish", lambda *_: None)


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., Written]:
    """``write_table(rows=37, dim=6, parts=5, per_file=2, dtype=bf16, form="plain", index=True)``.

    Beside the shards, every file holds another tensor of odd length, so that offsets are
    not multiples of a row.  For ``form`` see ``encode``; numbers for the whole table are in
    the last file.
    """

    def write(
        rows: int = 37,
        dim: int = 6,
        parts: int = 5,
        per_file: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        form: str = "plain",
        index: bool = True,
    ) -> Written:
        values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows))
        coded = encode(values, form, dtype)
        shape = TableShape(rows=rows, dim=dim, parts=parts)
        bounds, weight_map, files = [0], {}, []
        for part in range(parts):
            bounds.append(bounds[-1] + shape.shard_rows(part))
        for first in range(0, parts, per_file):
            path = tmp_path / f"model-{first:02d}.safetensors"
            tensors = {f"{PREFIX}layers.{first}.other": torch.arange(first + 3, dtype=torch.uint8)}
            for part in range(first, min(parts, first + per_file)):
                for leaf, tensor in coded.by_row.items():
                    name = f"{PREFIX}{LAYER}.shard_{part}.{leaf}"
                    tensors[name] = tensor[bounds[part] : bounds[part + 1]].clone()
            if first + per_file >= parts:
                tensors |= {f"{PREFIX}{LAYER}.{leaf}": tensor for leaf, tensor in coded.single.items()}
            save_file(tensors, path)
            weight_map |= dict.fromkeys(tensors, path.name)
            files.append(path)
        if index:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return Written(tmp_path, coded.values, shape, files)

    return write
