# SPDX-License-Identifier: Apache-2.0
"""Find the shards of one n-gram table in a model directory, and check them.

A table of ``rows`` rows is published as ``parts`` tensors ``shard_0`` … of
``ceil(rows / parts)`` rows each; the last one, or the last few, are shorter.  Some
checkpoints hold it as one tensor instead.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import (
    BadHeader,
    DuplicateShard,
    MissingShard,
    TableNotFound,
    UnreadableFile,
    WrongDtype,
    WrongShape,
)
from .header import DTYPES, TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a table: ``rows`` of them from byte ``offset`` of ``path``."""

    path: Path
    name: str
    offset: int
    rows: int


@dataclass(frozen=True)
class TableLocation:
    """A whole table: its shards in row order, and the form of a row."""

    shards: tuple[Shard, ...]
    dim: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class TableShape:
    """What the model's config says about its table.

    ``dtypes`` are the row dtypes that the layer can turn into activations.
    """

    rows: int
    dim: int
    parts: int
    dtypes: tuple[torch.dtype, ...]

    def shard_rows(self, index: int) -> int:
        """Rows of shard ``index``; 0 where the table ends before it."""
        full = -(-self.rows // self.parts)
        return max(0, min(full, self.rows - index * full))


def locate_table(folder: str | Path, layer: str, shape: TableShape) -> TableLocation:
    """Find one table by the name of its layer.

    Args:
        folder: the model directory
        layer: the end of the tensor names before ``.shard_<i>.weight``, such as
            ``layers.1.ple.ple_embedding.ngram_embedding``; what stands before it
            differs between text-only and multimodal checkpoints
        shape: what the config implies

    Raises:
        TableNotFound, MissingShard, DuplicateShard, WrongShape, WrongDtype,
        BadHeader, TruncatedFile, UnreadableFile
    """
    folder = Path(folder)
    found = _find(folder, layer)
    if not found:
        raise TableNotFound(folder, f"tensors *.{layer}.shard_<i>.weight", "none in *.safetensors")
    if None in found:
        if len(found) > 1:
            raise DuplicateShard(
                found[None][0],
                f"either {layer}.weight or shards of it",
                f"both, the latter in {next(p for i, (p, *_) in found.items() if i is not None)}",
            )
        wanted = {None: shape.rows}
    else:
        wanted = {i: n for i in range(shape.parts) if (n := shape.shard_rows(i))}
        # A last shard of no rows may be written or left out.
        empty = {i for i in range(shape.parts) if not shape.shard_rows(i)}
        if extra := sorted(set(found) - set(wanted) - empty):
            raise WrongShape(
                found[extra[0]][0],
                f"shards 0..{shape.parts - 1} (split_ngram_parts)",
                f"shard {extra[0]}",
            )
        if missing := sorted(set(wanted) - set(found)):
            raise MissingShard(
                folder,
                f"{len(wanted)} shards of {layer}",
                f"all but {len(missing)}, the first of them shard {missing[0]}",
            )
    shards = []
    for index, rows in wanted.items():
        path, name, entry = found[index]
        if entry.shape != (rows, shape.dim):
            raise WrongShape(path, f"{name} of shape {(rows, shape.dim)}", f"shape {entry.shape}")
        shards.append(Shard(path, name, entry.offset, rows))
    return TableLocation(tuple(shards), shape.dim, _dtype(found, wanted, shape))


def _dtype(found: dict, wanted: dict, shape: TableShape) -> torch.dtype:
    """The one dtype of all shards."""
    path, name, first = found[next(iter(wanted))]
    dtype = DTYPES.get(first.dtype)
    if dtype not in shape.dtypes:
        allowed = " or ".join(k for k, v in DTYPES.items() if v in shape.dtypes)
        raise WrongDtype(path, f"{allowed} for {name}", first.dtype)
    for index in wanted:
        path, name, entry = found[index]
        if entry.dtype != first.dtype:
            raise WrongDtype(path, f"{first.dtype} for {name}, as before", entry.dtype)
    return dtype


def _find(folder: Path, layer: str) -> dict[int | None, tuple[Path, str, TensorEntry]]:
    """Shard index (None: the undivided table) -> its file, name and place."""
    pattern = re.compile(rf"(?:^|\.){re.escape(layer)}(?:\.shard_(?P<index>\d+))?\.weight$")
    found: dict[int | None, tuple[Path, str, TensorEntry]] = {}
    for path, names in _files(folder, pattern).items():
        header = read_header(path)
        for name in header if names is None else names:
            match = pattern.search(name)
            if match is None:
                continue
            if name not in header:
                raise MissingShard(path, name, f"{len(header)} other tensors")
            index = match["index"] and int(match["index"])
            if index in found:
                raise DuplicateShard(path, f"{name} once", f"also in {found[index][0]}")
            found[index] = path, name, header[name]
    return found


def _files(folder: Path, pattern: re.Pattern) -> dict[Path, list[str] | None]:
    """Files to look into, each with the table's tensors in it where an index says so.

    With an index only the files that hold a part of the table are opened.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        return {path: None for path in sorted(folder.glob("*.safetensors"))}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if pattern.search(name):
                files.setdefault(folder / file, []).append(name)
    except OSError as error:
        raise UnreadableFile(index, "a readable index", error.strerror) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadHeader(index, "a weight_map of names to files", repr(error)) from error
    for path, names in files.items():
        if not path.exists():
            raise MissingShard(path, f"{len(names)} shards of the table", "no such file")
    return files
