"""Tables on a disk, to be read from."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from benchmarks.pipeline_rates.geometry import ROW_VALUES, TABLE_ROWS
from demo.checkpoint.sparse import write_file
from vllm.ampere.checkpoint.table import shard_rows
from vllm.models.qwen4_exp.ple_store.flat.layout import FlatLocation, FlatTable
from vllm.models.qwen4_exp.ple_store.formats import Table, locate_table
from vllm.models.qwen4_exp.ple_store.header import read_header
from vllm.models.qwen4_exp.ple_store.locate import TableShape

LAYER = "layers.1.ple.ple_embedding.ngram_embedding"
#: Tensors of every shard, by what the rows are: bf16 as released; fp8 as in the FP8 release, with one scale for the whole
#: table, which costs no read; and fp8 with a scale for every row, as compressed-tensors writes it.
FORMS = {
    "bf16": {"weight": "BF16"},
    "fp8": {"weight": "F8_E4M3"},
    "fp8, scaled by row": {"weight": "F8_E4M3", "weight_scale": "BF16"},
}
SHARDS = 8
#: Shards of the published table.
PUBLISHED_SHARDS = 128


def random_table(folder: Path, form: str, rows: int, dim: int = ROW_VALUES) -> Table:
    """``rows`` random rows of ``dim`` values in SHARDS files, as a checkpoint holds them."""
    folder.mkdir(parents=True)
    dice = np.random.default_rng(0)
    # Small numbers in every dtype: a model that is given NaN ends its requests.
    words = dice.integers(0, 1 << 16, 1 << 25, dtype=np.uint16)
    block = (words & 0x807F | 0x3C00 if form == "bf16" else words & 0xBFBF).view(np.uint8)
    for shard in range(SHARDS):
        path = _write(folder, form, rows, SHARDS, shard, dim)
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(_data_offset(path))
            while (left := size - file.tell()) > 0:
                file.write(block[: min(left, len(block))])
            if form == "fp8" and not shard:
                # Random bytes are no positive number; any one does.
                entry = read_header(path)[f"{LAYER}.weight_scale"]
                file.seek(entry.offset)
                file.write(np.float32(0.01).tobytes())
            os.fsync(file.fileno())
    return locate_table(folder, LAYER, TableShape(rows, dim, SHARDS))


def published_shards(folder: Path, marks: dict[int, int]) -> Table:
    """The published table as holes, with some rows (number -> byte) filled; takes no space."""
    folder.mkdir(parents=True)
    for shard in range(PUBLISHED_SHARDS):
        _write(folder, "bf16", TABLE_ROWS, PUBLISHED_SHARDS, shard)
    table = locate_table(folder, LAYER, TableShape(TABLE_ROWS, ROW_VALUES, PUBLISHED_SHARDS))
    # By the header of each shard, not by the address arithmetic that is to be tested.
    full = shard_rows(TABLE_ROWS, PUBLISHED_SHARDS, 0)
    for row, value in marks.items():
        shard = table.rows.shards[row // full]
        _mark(shard.path, shard.offset + row % full * 320, value)
    return table


def published_flat(path: Path, table: Table, marks: dict[int, int]) -> None:
    """The same as one flat file."""
    flat = FlatTable.of(table, LAYER, ROW_VALUES, {"checkpoint": "holes", "files": []})
    with open(path, "wb") as file:
        file.truncate(flat.size)
        file.write(flat.header())
    for row, value in marks.items():
        _mark(path, FlatLocation(path, flat).table.data_offset + row // 12 * 4096 + row % 12 * 320, value)


def _mark(path: Path, offset: int, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes([value]) * 320)


def _write(folder: Path, form: str, rows: int, shards: int, shard: int, dim: int = ROW_VALUES) -> Path:
    path = folder / f"table-{shard:03d}.safetensors"
    count = shard_rows(rows, shards, shard)
    tensors = {
        f"{LAYER}.shard_{shard}.{leaf}": (dtype, (count, dim if leaf == "weight" else 1))
        for leaf, dtype in FORMS[form].items()
    }
    if form == "fp8" and not shard:
        tensors[f"{LAYER}.weight_scale"] = ("F32", (1,))
    write_file(path, tensors)
    return path


def _data_offset(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
