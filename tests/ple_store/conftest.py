"""Small tables in the published layout, written with safetensors."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm.models.qwen4_exp.ple_store.locate import TableLocation, TableShape, locate_table

LAYER = "layers.1.ple.ple_embedding.ngram_embedding"
PREFIX = "model.language_model."


@dataclass
class Written:
    """A table on disk: ``values`` is ``[rows, dim]``, ``files`` in the order of shards."""

    folder: Path
    values: torch.Tensor
    shape: TableShape
    files: list[Path]

    def locate(self, **changes: object) -> TableLocation:
        shape = TableShape(**{**self.shape.__dict__, **changes})
        return locate_table(self.folder, LAYER, shape)


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., Written]:
    """``write_table(rows=37, dim=6, parts=5, per_file=2, dtype=bf16, index=True)``.

    Beside the shards, every file holds another tensor of odd length, so that offsets are
    not multiples of a row.
    """

    def write(
        rows: int = 37,
        dim: int = 6,
        parts: int = 5,
        per_file: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        index: bool = True,
    ) -> Written:
        values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows)).to(dtype)
        shape = TableShape(rows=rows, dim=dim, parts=parts, dtypes=(dtype,))
        bounds, weight_map, files = [0], {}, []
        for part in range(parts):
            bounds.append(bounds[-1] + shape.shard_rows(part))
        for first in range(0, parts, per_file):
            path = tmp_path / f"model-{first:02d}.safetensors"
            tensors = {f"{PREFIX}layers.{first}.other": torch.arange(first + 3, dtype=torch.uint8)}
            for part in range(first, min(parts, first + per_file)):
                name = f"{PREFIX}{LAYER}.shard_{part}.weight"
                tensors[name] = values[bounds[part] : bounds[part + 1]].clone()
            save_file(tensors, path)
            weight_map |= dict.fromkeys(tensors, path.name)
            files.append(path)
        if index:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return Written(tmp_path, values, shape, files)

    return write
