# SPDX-License-Identifier: Apache-2.0
"""What a row of a table is made of, by the headers of its tensors.

The model-wide quantization method says nothing about the table: there are GPTQ, AWQ
and NVFP4 models with bf16 tables, and bf16, AWQ and NVFP4 models with fp8 tables.
Below ``…ngram_embedding.`` the published checkpoints hold, for rows of ``dim`` values:

    plain        shard_<i>.weight        BF16 (F16, F32)  [rows, dim]
    scaled       shard_<i>.weight        F8_E4M3          [rows, dim]
                 weight_scale            BF16 (F32, F16)  one number for the table
    row-scaled   shard_<i>.weight        F8_E4M3 or I8    [rows, dim]
                 shard_<i>.weight_scale  BF16, F32, F16   [rows, 1]
    nvfp4        shard_<i>.weight        U8, two values   [rows, dim / 2]
                 shard_<i>.weight_scale  F8_E4M3          [rows, dim / 16]
                 weight_scale_2          F32              one number for the table

Scaled is the layout of Qwen's own FP8 release, row-scaled that of compressed-tensors
("channel"), nvfp4 that of ModelOpt.  An undivided table has no ``shard_<i>.``.  Values
are stored value x scale, for nvfp4 times both scales; they are multiplied in float32
and rounded once.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from .errors import BadScale, UnknownRowFormat, WrongShape
from .header import DTYPES
from .locate import Found, LayerTensors, TableLocation, TableShape

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
CODES = (torch.float8_e4m3fn, torch.int8)

_NVFP4_BLOCK = 16


class Kind(Enum):
    """The four layouts above."""

    PLAIN = "plain"
    SCALED = "scaled"
    ROW_SCALED = "row-scaled"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class Table:
    """A located table.

    Attributes:
        kind: its layout
        rows: the stored rows
        row_scales: the scales that belong to a row, ``None`` where there are none
        table_scale: the number for the whole table; 1 where there is none
    """

    kind: Kind
    rows: TableLocation
    row_scales: TableLocation | None = None
    table_scale: float = 1.0

    def __str__(self) -> str:
        dtype = str(self.rows.dtype).removeprefix("torch.")
        return dtype if self.kind is Kind.PLAIN else f"{dtype} {self.kind.value}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its own scales."""
        return self.rows.row_bytes + (self.row_scales.row_bytes if self.row_scales else 0)

    @property
    def count(self) -> int:
        """Rows."""
        return self.rows.rows

    @property
    def paths(self) -> set[Path]:
        """Files that hold a part of the rows."""
        return {shard.path for part in (self.rows, self.row_scales) if part for shard in part.shards}


def locate_table(folder: str | Path, layer: str, shape: TableShape) -> Table:
    """Find one table and its scales, and check them against each other and the config.

    Args:
        folder: the model directory
        layer: as for ``LayerTensors``
        shape: what the config implies

    Raises:
        PLEStoreError: a subclass for each way to be wrong
    """
    tensors = LayerTensors(folder, layer, shape)
    stored = DTYPES.get(tensors.dtype("weight"))
    width = tensors.width("weight")
    if stored in PLAIN:
        _only(tensors, "weight")
        return Table(Kind.PLAIN, tensors.by_row("weight", shape.dim))
    if stored in CODES and (tensors.has_shards("weight_scale") or _is_column(tensors.single("weight_scale"))):
        _only(tensors, "weight", "weight_scale")
        scales = tensors.by_row("weight_scale", 1)
        if scales.dtype not in PLAIN:
            raise UnknownRowFormat(tensors.path("weight_scale"), "BF16, F16 or F32 scales", str(scales.dtype))
        return Table(Kind.ROW_SCALED, tensors.by_row("weight", shape.dim), scales)
    if stored is torch.float8_e4m3fn:
        _only(tensors, "weight", "weight_scale")
        scale = _number(tensors, "weight_scale")
        return Table(Kind.SCALED, tensors.by_row("weight", shape.dim), table_scale=scale)
    if stored is torch.uint8 and width * 2 == shape.dim and shape.dim % _NVFP4_BLOCK == 0:
        _only(tensors, "weight", "weight_scale", "weight_scale_2")
        scale = _number(tensors, "weight_scale_2")
        if "weight_scale" not in tensors.leaves:
            raise BadScale(tensors.path("weight"), f"*.{layer}.shard_<i>.weight_scale", "none")
        blocks = tensors.by_row("weight_scale", shape.dim // _NVFP4_BLOCK)
        if blocks.dtype is not torch.float8_e4m3fn:
            raise UnknownRowFormat(tensors.path("weight_scale"), "F8_E4M3 block scales", str(blocks.dtype))
        return Table(Kind.NVFP4, tensors.by_row("weight", shape.dim // 2), blocks, scale)
    if stored is torch.uint8:
        raise WrongShape(tensors.path("weight"), f"{shape.dim // 2} bytes per row for nvfp4", f"{width}")
    raise UnknownRowFormat(
        tensors.path("weight"), "BF16, F16, F32, F8_E4M3, I8 or U8 rows", f"{tensors.dtype('weight')} rows"
    )


def dequantize(table: Table, rows: torch.Tensor, row_scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Turn stored rows into activations.

    Args:
        rows: ``[..., stored elements per row]`` in the file's dtype, on any device
        row_scales: ``[..., scales per row]``, where the table has them
        dtype: of the activations

    Returns:
        ``[..., dim]``
    """
    if table.kind is Kind.PLAIN:
        return rows.to(dtype)
    if table.kind is Kind.NVFP4:
        from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

        scale = torch.tensor(table.table_scale, dtype=torch.float32, device=rows.device)
        flat = dequantize_to_dtype(rows.flatten(0, -2), row_scales.flatten(0, -2), scale, dtype, swizzle=False)
        return flat.view(*rows.shape[:-1], -1)
    if row_scales is None:
        return (rows.float() * table.table_scale).to(dtype)
    return (rows.float() * row_scales.float()).to(dtype)


def _is_column(found: Found | None) -> bool:
    """Whether an undivided scale has one number per row, rather than one for all."""
    return found is not None and len(found.entry.shape) == 2 and found.entry.shape[0] > 1


def _only(tensors: LayerTensors, *leaves: str) -> None:
    """Refuse tensors beside the table whose meaning is not known: they might change its values."""
    if extra := sorted(tensors.leaves - set(leaves)):
        raise UnknownRowFormat(
            tensors.path(extra[0]),
            f"{' and '.join(leaves)} with {tensors.dtype('weight')} rows",
            f"{tensors.layer}.{extra[0]} too",
        )


def _number(tensors: LayerTensors, leaf: str) -> float:
    """Read the one number ``leaf``, a scale for the whole table.

    Raises:
        BadScale: it is missing, is more than one number, or is no positive number
    """
    wanted = f"one positive number *.{tensors.layer}.{leaf}"
    found = tensors.single(leaf)
    if found is None:
        raise BadScale(tensors.path("weight"), wanted, "none")
    dtype = DTYPES.get(found.entry.dtype)
    if dtype not in PLAIN or found.entry.shape not in ((), (1,), (1, 1)):
        raise BadScale(found.path, wanted, f"{found.entry.dtype} of shape {found.entry.shape}")
    with open(found.path, "rb") as file:
        file.seek(found.entry.offset)
        value = torch.frombuffer(bytearray(file.read(dtype.itemsize)), dtype=dtype).item()
    if not 0 < value < float("inf"):
        raise BadScale(found.path, wanted, f"{value}")
    return value
