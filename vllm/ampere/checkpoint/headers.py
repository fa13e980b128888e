# SPDX-License-Identifier: Apache-2.0
"""The header of one safetensors file: names, dtypes, shapes and places, without the data.

Layout: eight bytes of header length (little endian), a JSON object, the data. `data_offsets` count from the data's
first byte, and tensors follow one another without a gap.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from vllm.ampere.checkpoint.errors import (
    FileIsPointer,
    FileUnreadable,
    HeaderLongerThanFile,
    NamedTwiceInHeader,
    NotSafetensors,
    OffsetsLeaveHole,
    OffsetsOverlap,
    ShardTooLong,
    ShardTruncated,
    TensorBytesWrong,
)
from vllm.ampere.finding import Finding

# What the safetensors library itself accepts.
MAX_HEADER_BYTES = 100_000_000
_POINTER = b"version https://git-lfs"

#: bits of one element, for every dtype that safetensors names
BITS = {
    **dict.fromkeys(("F4", "F4_E2M1"), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


#: first byte and the one after the last, counted from the end of the header; name, dtype as written, shape
Entry = tuple[int, int, str, str, tuple[int, ...]]


class Tensor(NamedTuple):
    """One tensor: the name of its file, dtype as written, shape, size in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class Shard:
    """One file: its size in bytes, its tensors, and what is wrong with it."""

    path: Path
    size: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)


def read_shard(path: Path) -> Shard:
    """Read a header and hold it against the file's size. Raises nothing: what is wrong is in `faults`."""
    return parse(fetch(path))


def fetch(path: Path) -> tuple[Shard, bytes]:
    """The part that waits for a disk: the header's text, empty where there is none to parse."""
    shard = Shard(path)
    try:
        with open(path, "rb") as file:
            shard.size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if start == _POINTER[:8]:
                shard.faults.append(FileIsPointer(path.name, "safetensors", f"a pointer of {shard.size} bytes"))
                return shard, b""
            length = int.from_bytes(start, "little")
            if len(start) == 8 and 8 + length > shard.size:
                shard.faults.append(
                    HeaderLongerThanFile(path.name, f"a header of {length} bytes", f"a file of {shard.size} bytes")
                )
            elif not 2 <= length <= MAX_HEADER_BYTES:
                shard.faults.append(
                    NotSafetensors(path.name, f"a header of 2 to {MAX_HEADER_BYTES} bytes", f"{length} bytes")
                )
            else:
                return shard, file.read(length)
    except OSError as error:
        shard.faults.append(FileUnreadable(path.name, "a readable file", error.strerror))
    return shard, b""


def parse(fetched: tuple[Shard, bytes]) -> Shard:
    """The part that computes: the text that `fetch` got, as tensors and faults of its shard."""
    shard, text = fetched
    if not text:
        return shard
    name = shard.path.name
    try:
        found = sorted(entries(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shard.faults.append(NotSafetensors(name, "a JSON map of tensors", repr(error)))
        return shard
    # Python keeps the last of two equal keys; a hook that sees both would cost as much as all the rest.
    if (records := text.count(b'"data_offsets"')) > len(found):
        shard.faults.append(NamedTwiceInHeader(name, f"{records} tensors", f"{len(found)} different names"))
    _place(shard, found, 8 + len(text))
    return shard


def entries(text: bytes) -> list[Entry]:
    """The tensors that a header's text names, as they are written.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is no JSON map of tensors
    """
    header = json.loads(text)
    header.pop("__metadata__", None)
    found = []
    for key, raw in header.items():
        (first, last), dtype, shape = raw["data_offsets"], raw["dtype"], tuple(raw["shape"])
        if type(dtype) is not str or any(type(n) is not int or n < 0 for n in (first, last, *shape)):
            raise TypeError(f"{key} has dtype {dtype!r}, shape {[*shape]} and offsets {[first, last]}")
        found.append((first, last, key, dtype, shape))
    return found


def _place(shard: Shard, found: list[Entry], data_start: int) -> None:
    """Enter tensors into the shard, in order of their bytes, and note where these cannot be."""
    name, faults = shard.path.name, shard.faults
    end, before = 0, ""
    for first, last, key, dtype, shape in found:
        bits = BITS.get(dtype)
        if last < first or (bits is not None and (last - first) * 8 != prod(shape) * bits):
            size = f"{prod(shape) * bits // 8} bytes" if bits else "a size"
            faults.append(TensorBytesWrong(f"{name}, {key}", f"{size} ({dtype} {[*shape]})", f"{last - first} bytes"))
            last = max(first, last)
        if first < end:
            place = f"{name}, {before} and {key}"
            faults.append(OffsetsOverlap(place, f"the second from byte {end} on", f"from byte {first} on"))
        elif first > end:
            faults.append(OffsetsLeaveHole(f"{name}, before {key}", f"byte {end}", f"byte {first}"))
        if last > end:
            end, before = last, key
        shard.tensors[key] = Tensor(name, dtype, shape, last - first)
    if shard.size < data_start + end:
        faults.append(ShardTruncated(name, f"{data_start + end} bytes", f"{shard.size} bytes"))
    elif shard.size > data_start + end:
        faults.append(ShardTooLong(name, f"{data_start + end} bytes", f"{shard.size} bytes"))
