# SPDX-License-Identifier: Apache-2.0
"""Find one n-gram table in a model directory, and check it.

A table of ``rows`` rows is published as ``parts`` tensors ``shard_0`` … of
``ceil(rows / parts)`` rows each; the last one, or the last few, are shorter.  Some
checkpoints hold it as one tensor instead.  What a row is made of, and where its scales
are, is ``formats.py``'s.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from vllm.ampere.checkpoint.config import TableConfig, TextConfig
from vllm.ampere.checkpoint.documents import INDEX
from vllm.ampere.checkpoint.table import shard_rows, table_rows

from .errors import (
    BadHeader,
    DuplicateShard,
    MissingShard,
    TableNotFound,
    UnknownRowFormat,
    UnreadableFile,
    WrongDtype,
    WrongShape,
)
from .header import DTYPES, TensorEntry, read_header


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a table: ``rows`` of them from byte ``offset`` of ``path``."""

    path: Path
    name: str
    offset: int
    rows: int


@dataclass(frozen=True)
class TableLocation:
    """One tensor by row, cut into shards: the rows of a table, or the scales of its rows.

    ``dim`` counts the stored elements of a row, each of ``dtype``.
    """

    shards: tuple[Shard, ...]
    dim: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @property
    def paths(self) -> list[Path]:
        """Its files, each once."""
        return list(dict.fromkeys(shard.path for shard in self.shards))

    def place(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where rows are: int64 ``ids`` of the table -> index into ``paths`` and byte offset, int64 each."""
        starts, offsets, files = self._index
        shard = np.searchsorted(starts, ids, side="right") - 1
        return files[shard], offsets[shard] + (ids - starts[shard]) * self.row_bytes

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of every shard: its first row, its offset, its file."""
        number = {path: index for index, path in enumerate(self.paths)}
        starts = np.cumsum([0, *(shard.rows for shard in self.shards[:-1])], dtype=np.int64)
        offsets = np.array([shard.offset for shard in self.shards], dtype=np.int64)
        return starts, offsets, np.array([number[shard.path] for shard in self.shards], dtype=np.int64)


@dataclass(frozen=True)
class TableShape:
    """What the model's config says about its table: ``rows`` of ``dim`` values, in ``parts`` shards."""

    rows: int
    dim: int
    parts: int

    def shard_rows(self, index: int) -> int:
        """Rows of shard ``index``; 0 where the table ends before it."""
        return shard_rows(self.rows, self.parts, index)


def tables_of(text: TextConfig | TableConfig) -> Iterator[tuple[int, str, TableShape]]:
    """Every table of a model: its layer counted from zero, the name that `LayerTensors` takes, its shape."""
    for index, one_based in enumerate(text.ple_layer_ids):
        shape = TableShape(table_rows(text, index), text.ple_embed_dim // text.ngram_heads, text.split_ngram_parts)
        yield one_based - 1, f"layers.{one_based - 1}.ple.ple_embedding.ngram_embedding", shape


@dataclass(frozen=True)
class Found:
    """One tensor of the layer: where it is and what its header says."""

    path: Path
    name: str
    entry: TensorEntry


class LayerTensors:
    """All tensors that a checkpoint has below one n-gram layer, by last name and shard.

    Only headers are read, and where there is an index only those of files that hold a
    part of the table.
    """

    def __init__(self, folder: str | Path, layer: str, shape: TableShape) -> None:
        """Look for the layer.

        Args:
            folder: the model directory
            layer: the end of the tensor names before ``.shard_<i>.weight``, such as
                ``layers.1.ple.ple_embedding.ngram_embedding``; what stands before it
                differs between text-only and multimodal checkpoints
            shape: what the config implies

        Raises:
            TableNotFound, MissingShard, DuplicateShard, BadHeader, TruncatedFile,
            UnreadableFile, UnknownRowFormat
        """
        self.folder, self.layer, self.shape = Path(folder), layer, shape
        self._by_leaf = _find(self.folder, layer)
        if not self._by_leaf:
            raise TableNotFound(folder, f"tensors *.{layer}.shard_<i>.weight", "none in *.safetensors")
        if "weight" not in self._by_leaf:
            found = next(iter(next(iter(self._by_leaf.values())).values()))
            raise UnknownRowFormat(found.path, f"rows in *.{layer}.shard_<i>.weight", found.name)

    @property
    def leaves(self) -> set[str]:
        """Last names of the layer's tensors: ``weight``, and those of scales."""
        return set(self._by_leaf)

    def single(self, leaf: str) -> Found | None:
        """The layer's tensor ``leaf`` that belongs to no shard."""
        return self._by_leaf.get(leaf, {}).get(None)

    def has_shards(self, leaf: str) -> bool:
        return any(index is not None for index in self._by_leaf.get(leaf, {}))

    def by_row(self, leaf: str, dim: int) -> TableLocation:
        """The tensor ``leaf`` with ``dim`` stored elements for each row of the table.

        Raises:
            MissingShard, DuplicateShard, WrongShape, WrongDtype
        """
        found = self._by_leaf.get(leaf, {})
        wanted = self._wanted_shards(leaf, found)
        shards = []
        for index, rows in wanted.items():
            one = found[index]
            if one.entry.shape != (rows, dim):
                raise WrongShape(one.path, f"{one.name} of shape {(rows, dim)}", f"shape {one.entry.shape}")
            shards.append(Shard(one.path, one.name, one.entry.offset, rows))
        return TableLocation(tuple(shards), dim, self._dtype([found[i] for i in wanted]))

    def width(self, leaf: str) -> int:
        """Stored elements per row of ``leaf``, by its first tensor; 0 where that is no matrix."""
        shape = next(iter(self._by_leaf[leaf].values())).entry.shape
        return shape[1] if len(shape) == 2 else 0

    def dtype(self, leaf: str) -> str:
        """What the header of the first tensor ``leaf`` says, such as ``BF16``."""
        return next(iter(self._by_leaf[leaf].values())).entry.dtype

    def path(self, leaf: str) -> Path:
        return next(iter(self._by_leaf[leaf].values())).path

    def _wanted_shards(self, leaf: str, found: dict[int | None, Found]) -> dict[int | None, int]:
        """Shard index (None: undivided) -> rows, for those that must be and are there."""
        shape = self.shape
        if None in found:
            if len(found) > 1:
                raise DuplicateShard(
                    found[None].path,
                    f"either {self.layer}.{leaf} or shards of it",
                    f"both, the latter in {next(one.path for i, one in found.items() if i is not None)}",
                )
            return {None: shape.rows}
        wanted: dict[int | None, int] = {i: n for i in range(shape.parts) if (n := shape.shard_rows(i))}
        # A last shard of no rows may be written or left out.
        empty = {i for i in range(shape.parts) if not shape.shard_rows(i)}
        if extra := sorted(set(found) - set(wanted) - empty):
            raise WrongShape(
                found[extra[0]].path,
                f"shards 0..{shape.parts - 1} (split_ngram_parts)",
                f"shard {extra[0]}",
            )
        if missing := sorted(set(wanted) - set(found)):
            raise MissingShard(
                self.folder,
                f"{len(wanted)} shards {self.layer}.shard_<i>.{leaf}",
                f"all but {len(missing)}, the first of them shard {missing[0]}",
            )
        return wanted

    @staticmethod
    def _dtype(tensors: list[Found]) -> torch.dtype:
        """The one dtype of all shards."""
        first = tensors[0]
        for one in tensors:
            if one.entry.dtype != first.entry.dtype:
                raise WrongDtype(one.path, f"{first.entry.dtype} for {one.name}, as before", one.entry.dtype)
        dtype = DTYPES.get(first.entry.dtype)
        if dtype is None:
            raise WrongDtype(first.path, f"{' or '.join(DTYPES)} for {first.name}", first.entry.dtype)
        return dtype


def _find(folder: Path, layer: str) -> dict[str, dict[int | None, Found]]:
    """Last name -> shard index (None: no shard) -> tensor."""
    pattern = re.compile(rf"(?:^|\.){re.escape(layer)}(?:\.shard_(?P<index>\d+))?\.(?P<leaf>\w+)$")
    found: dict[str, dict[int | None, Found]] = {}
    for path, names in _files(folder, pattern).items():
        header = read_header(path)
        for name in header if names is None else names:
            match = pattern.search(name)
            if match is None:
                continue
            if name not in header:
                raise MissingShard(path, name, f"{len(header)} other tensors")
            index = match["index"] and int(match["index"])
            same = found.setdefault(match["leaf"], {})
            if index in same:
                raise DuplicateShard(path, f"{name} once", f"also in {same[index].path}")
            same[index] = Found(path, name, header[name])
    return found


def _files(folder: Path, pattern: re.Pattern) -> dict[Path, list[str] | None]:
    """Files to look into, each with the table's tensors in it where an index says so.

    With an index only the files that hold a part of the table are opened.
    """
    index = folder / INDEX
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
            raise MissingShard(path, f"{len(names)} tensors of the table", "no such file")
    return files
