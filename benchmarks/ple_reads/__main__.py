"""Reads of the n-gram table, cold and warm, from shards and from a flat file.

    python -m benchmarks.ple_reads [--folder DIR] [--rows N] [--out FILE.json]

Writes a few GB of random rows below DIR, which has to be on a real disk, and removes them at the end. Two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.pipeline_rates.geometry import ROW_VALUES, TABLE_ROWS
from vllm.models.qwen4_exp.ple_store.flat.layout import read_flat_header
from vllm.models.qwen4_exp.ple_store.flat.reader import FlatReader
from vllm.models.qwen4_exp.ple_store.flat.verify import verify
from vllm.models.qwen4_exp.ple_store.flat.writer import flatten
from vllm.models.qwen4_exp.ple_store.reader import TableReader

from . import record
from .files import FORMS, LAYER, published_flat, published_shards, random_table
from .measure import cases, loaded, mapped


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ple_reads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rows", type=int, default=12_800_000, help="of the random tables: 4.1 GB in bf16")
    parser.add_argument("--out", type=Path, default=record.RECORD)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        # In a process of its own, so that its memory is its own.
        folder, form, rows, flat = asked.one
        for sample in cases(Path(folder), form, int(rows), Path(flat) if flat else None):
            print(json.dumps(sample), flush=True)
        return 0
    samples: list[dict] = []
    # What else the machine does shows in the times, not in the bytes.
    settings = {"table_rows": asked.rows, "readahead_kib": _readahead(asked.folder), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        for sample in measure(Path(scratch), asked.rows):
            samples.append(sample)
            print(json.dumps({key: value for key, value in sample.items() if key != "ms"}), flush=True)
    claims = record.claims(samples)
    record.write_record(asked.out, settings, samples)
    for claim in claims:
        print(
            f"{'holds' if claim.holds else 'SHORT'}  {claim.name}: {claim.value} {claim.unit} ({claim.compare} {claim.aim})"
        )
    return 0 if all(claim.holds for claim in claims) else 1


def measure(scratch: Path, rows: int) -> Iterator[dict]:
    for form in FORMS:
        table = random_table(scratch / form, form, rows)
        flat = scratch / f"{form}.flat"
        begun = time.perf_counter()
        made = flatten(table, LAYER, ROW_VALUES, flat)
        seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        verify(flat)
        yield {
            "what": "flatten",
            "rows": form,
            "bytes": made.size,
            "of_rows": rows * made.row_bytes,
            "seconds": round(seconds, 2),
            "verify_seconds": round(time.perf_counter() - begun, 2),
        }
        if form == "bf16":
            for advised in (False, True):
                yield mapped(table.rows.paths[0], advised)
            yield loaded(table.rows.paths)
        for path in ("", str(flat)):
            yield from one(scratch / form, form, rows, path)
        flat.unlink()
        for path in table.paths:
            path.unlink()
    yield holes(scratch)


def one(folder: Path, form: str, rows: int, flat: str) -> Iterator[dict]:
    command = [sys.executable, "-m", "benchmarks.ple_reads", "--one", str(folder), form, str(rows), flat]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")


def holes(scratch: Path) -> dict:
    """Rows of a table of the published size, in shards and in one file: how many come from where they are not."""
    dice = np.random.default_rng(5)
    wanted = np.unique(np.concatenate((dice.integers(0, TABLE_ROWS, 400), [0, TABLE_ROWS - 1, 2_500_011, 2_500_012])))
    marks = {int(row): 1 + number % 255 for number, row in enumerate(wanted[::2].tolist())}
    table = published_shards(scratch / "published", marks)
    flat = scratch / "published.flat"
    published_flat(flat, table, marks)
    expected = np.array([marks.get(int(row), 0) for row in wanted])[:, None]
    wrong = 0
    for store in (TableReader(table), FlatReader(flat, read_flat_header(flat))):
        wrong += int((store.read(wanted).numpy() != expected).any(axis=1).sum())
        store.close()
    return {
        "what": "published size",
        "bytes": {"shards": table.count * table.row_bytes, "flat": flat.stat().st_size},
        "read": 2 * len(wanted),
        "wrong": wrong,
    }


def _readahead(folder: Path) -> int | None:
    """Of the disk that holds `folder`; what a mapping without advice reads around every row."""
    device = folder.stat().st_dev
    path = Path(f"/sys/dev/block/{device >> 8}:{device & 255}")
    for place in (path / "queue", path / ".." / "queue"):
        try:
            return int((place / "read_ahead_kb").read_text())
        except (OSError, ValueError):
            continue
    return None


if __name__ == "__main__":
    sys.exit(main())
