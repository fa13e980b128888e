# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of each tensor are in a safetensors file.

A file is ``u64 length`` (little endian), ``length`` bytes of JSON, then the data.
The JSON maps a tensor's name to ``dtype``, ``shape`` and ``data_offsets``, the latter
counted from the end of the JSON.  The library can give out tensors but not offsets,
and ``pread`` needs an offset.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.ampere.checkpoint.headers import MAX_HEADER_BYTES, entries

from .errors import BadHeader, TruncatedFile, UnreadableFile

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""safetensors dtype -> torch dtype, for those that a table or its scales may have."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype as written, shape, and absolute offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the names and places of a file's tensors, without their data.

    Raises:
        UnreadableFile: it cannot be opened
        BadHeader: it is no safetensors file
        TruncatedFile: the data of some tensor goes beyond its end
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= MAX_HEADER_BYTES:
                raise BadHeader(
                    path,
                    f"a header of 2 to {MAX_HEADER_BYTES} bytes",
                    f"{length} bytes in a file of {size}",
                )
            text = file.read(length)
    except OSError as error:
        raise UnreadableFile(path, "a readable file", error.strerror) from error
    if len(text) < length:
        raise TruncatedFile(path, f"a header of {length} bytes", f"{len(text)} bytes")
    try:
        found = entries(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadHeader(path, "a JSON map of tensors", repr(error)) from error
    for begin, end, name, dtype, shape in found:
        _check(path, name, dtype, shape, end - begin, 8 + length + end, size)
    return {name: TensorEntry(dtype, shape, 8 + length + begin) for begin, _, name, dtype, shape in found}


def _check(path: Path, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, last: int, size: int) -> None:
    """Check one tensor's ``nbytes``, which end before byte ``last``, against its shape and the file's ``size``."""
    if last > size:
        raise TruncatedFile(path, f"{last} bytes (for {name})", f"{size} bytes")
    known = DTYPES.get(dtype)
    # Other dtypes are of no concern here: they never become a table.
    if known is not None and nbytes != math.prod(shape) * known.itemsize:
        raise BadHeader(path, f"{math.prod(shape) * known.itemsize} bytes for {name}", f"{nbytes} bytes")
