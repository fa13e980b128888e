"""Cases: what is read, from where, by how many users."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.pipeline_rates.geometry import ROW_VALUES
from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.models.qwen4_exp.ple_store.embedding import open_store
from vllm.models.qwen4_exp.ple_store.locate import TableShape

from .files import LAYER, SHARDS
from .step import HEADS, Steps

DECODES, CHUNKS, CHUNK = 200, 5, 2048
MAPPED = 12


def drop(paths: list[Path]) -> None:
    """Out of the page cache; asks for no rights, unlike /proc/sys/vm/drop_caches."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_bytes() -> int:
    """What the kernel has read from disks for this process."""
    return int(_fields("/proc/self/io")["read_bytes"])


def memory() -> dict[str, int]:
    """Bytes of this process that are locked, and that are resident without pages of files."""
    status = _fields("/proc/self/status")
    return {name: int(status[key].split()[0]) * 1024 for name, key in (("locked", "VmLck"), ("resident", "RssAnon"))}


def cases(folder: Path, form: str, rows: int, flat: Path | None) -> Iterator[dict]:
    """Samples of one store over one table."""
    shape = TableShape(rows, ROW_VALUES, SHARDS)
    engram = SimpleNamespace(host_file_path=str(flat) if flat else None)
    before, begun, counters = memory(), time.perf_counter(), Counters()
    store = open_store(engram, str(folder), LAYER, shape, counters)
    opened = 1e3 * (time.perf_counter() - begun)
    about = {"store": "flat" if flat else "shards", "rows": form}
    steps = Steps(store, counters, CHUNK)
    buffer = steps.rows.nbytes
    # Code that this process runs for the first time comes from the disk too, where tables have left nothing else in the page
    # cache, and the kernel counts it with the rows: 3 to 5 MB.
    _run(steps, [steps.draw(1, tokens) for tokens in (1, 1, CHUNK)], 1)
    for users in (1, 4):
        drop(store.paths)
        drawn = [steps.draw(users, 1) for _ in range(DECODES)]
        for cache in ("cold", "warm"):
            yield about | {"what": "decode", "users": users, "cache": cache} | _run(steps, drawn, users)
    drawn = [steps.draw(1, CHUNK) for _ in range(CHUNKS)]
    drop(store.paths)
    for cache in ("cold", "warm"):
        yield about | {"what": "chunk", "users": 1, "cache": cache} | _run(steps, drawn, CHUNK)
    yield about | {"what": "chunk", "users": 1, "cache": "read ahead"} | _read_ahead(steps, drawn)
    after = memory()
    yield about | {
        "what": "memory",
        "open_ms": round(opened, 2),
        "locked_bytes": after["locked"] - before["locked"],
        "resident_bytes": after["resident"] - before["resident"],
        "of_which_buffer": buffer,
    }
    steps.close()


def _run(steps: Steps, drawn: list, tokens: int) -> dict:
    disk, counted = disk_bytes(), steps.counters.snapshot()
    milliseconds = [round(steps.stage(step), 4) for step in drawn]
    now = steps.counters.snapshot()
    per_token = 1024 * tokens * len(drawn)
    return {
        "tokens": tokens,
        "ms": milliseconds,
        "kib_per_token": round((disk_bytes() - disk) / per_token, 3),
        "counted_kib_per_token": round((now["disk_bytes"] - counted["disk_bytes"]) / per_token, 3),
        "requested_kib_per_token": round((now["requested_bytes"] - counted["requested_bytes"]) / per_token, 3),
        "cached_reads": now["cached_reads"] - counted["cached_reads"],
        "missed_reads": now["missed_reads"] - counted["missed_reads"],
    }


def _read_ahead(steps: Steps, drawn: list) -> dict:
    """Chunks whose rows were read, from the page cache here, before they were asked for."""
    milliseconds = []
    for step in drawn:
        steps.fetcher.read_ahead(partial(steps.hash, *step))
        steps.fetcher._ahead.records.result()
        milliseconds.append(round(steps.stage(step), 4))
    return {"tokens": CHUNK, "ms": milliseconds}


def mapped(path: Path, advised: bool) -> dict:
    """Rows from a mapping of one file, as the first ports of the table to a disk read them."""
    drop([path])
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory_:
        if advised:
            memory_.madvise(mmap.MADV_RANDOM)
        table = np.frombuffer(memory_, dtype=np.uint8)[4096:]
        rows = len(table) // 320
        table = table[: rows * 320].reshape(rows, 320)
        dice = np.random.default_rng(1)
        disk, milliseconds = disk_bytes(), []
        for _ in range(MAPPED):
            ids = np.sort(dice.integers(0, rows, HEADS))
            begun = time.perf_counter()
            table[ids].sum()
            milliseconds.append(round(1e3 * (time.perf_counter() - begun), 4))
        per_token = round((disk_bytes() - disk) / MAPPED / 1024, 3)
        del table
    store = "mapping, MADV_RANDOM" if advised else "mapping"
    sample = {"store": store, "rows": "bf16", "what": "decode", "users": 1, "cache": "cold", "tokens": 1}
    return sample | {"ms": milliseconds, "kib_per_token": per_token}


def loaded(paths: list[Path], limit: int = 1 << 30) -> dict:
    """Seconds to load a part of a table, cold: what upstream does before it is ready."""
    drop(paths)
    done, begun = 0, time.perf_counter()
    for path in paths:
        with open(path, "rb") as file:
            while done < limit and (part := len(file.read(1 << 24))):
                done += part
    seconds = time.perf_counter() - begun
    return {"what": "load", "bytes": done, "seconds": round(seconds, 3)}


def _fields(path: str) -> dict[str, str]:
    with open(path) as lines:
        return dict(line.rstrip("\n").split(":", 1) for line in lines)
