"""The benchmark of reads on a small table, and what its claims are made of."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pipeline_rates.geometry import ROW_VALUES, TABLE_ROWS
from benchmarks.ple_reads import pages, record
from benchmarks.ple_reads.__main__ import holes
from benchmarks.ple_reads.files import FORMS, LAYER, PUBLISHED_SHARDS, published_shards, random_table
from benchmarks.ple_reads.measure import cases
from benchmarks.ple_reads.step import Steps
from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.models.qwen4_exp.ple_store.flat.writer import flatten
from vllm.models.qwen4_exp.ple_store.formats import locate_table
from vllm.models.qwen4_exp.ple_store.locate import TableShape
from vllm.models.qwen4_exp.ple_store.reader import TableReader


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr("benchmarks.ple_reads.measure.DECODES", 3)
    monkeypatch.setattr("benchmarks.ple_reads.measure.CHUNKS", 1)
    monkeypatch.setattr("benchmarks.ple_reads.measure.CHUNK", 16)


@pytest.mark.parametrize("form", FORMS)
def test_every_case_of_a_small_table(tmp_path, form):
    table = random_table(tmp_path / "table", form, 20_000)
    flatten(table, "layers.1.ple.ple_embedding.ngram_embedding", 160, tmp_path / "flat")
    some = TableReader(table).gather(torch.arange(1000))[0].float()
    assert some.isfinite().all() and len(some.unique()) > 100
    for flat in (None, tmp_path / "flat"):
        found = list(cases(tmp_path / "table", form, 20_000, flat))
        assert [one["what"] for one in found] == ["decode"] * 4 + ["chunk"] * 3 + ["memory"]
        assert found[1]["kib_per_token"] == 0 and found[1]["requested_kib_per_token"] > 0
        assert found[-1]["locked_bytes"] == 0


def test_steps_ask_for_rows_of_all_heads(tmp_path):
    counters = Counters()
    steps = Steps(TableReader(random_table(tmp_path / "t", "bf16", 20_000), counters=counters), counters, 8)
    ids = steps.hash(*steps.draw(2, 4))
    assert ids.shape == (8, 16) and (ids // (20_000 // 16) == range(16)).all()
    assert steps.stage(steps.draw(2, 4)) > 0 and counters.rows == 8 * 16


def test_a_table_of_the_published_size_takes_no_space(tmp_path):
    assert holes(tmp_path)["wrong"] == 0


def test_finding_a_table_reads_headers_only(tmp_path):
    """So that a server may do it twice: before it starts anything, and in the stage that opens the files."""
    table = published_shards(tmp_path / "table", {})
    assert table.count * table.row_bytes > 100e9

    def bytes_read() -> int:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["rchar"])

    before, begun = bytes_read(), time.process_time()
    again = locate_table(tmp_path / "table", LAYER, TableShape(TABLE_ROWS, ROW_VALUES, PUBLISHED_SHARDS))
    # Measured: 2 ms, and a page of each of 128 files.
    assert bytes_read() - before < 128 * 16384 and time.process_time() - begun < 1
    assert again == table


def test_percentiles():
    assert record.percentile([3, 1, 2], 0.5) == 2 and record.percentile([3, 1, 2], 0.99) == 3


@pytest.mark.parametrize("size", [320, 160, 96])
@pytest.mark.parametrize("begin", [0, 8, 3776, 3784])
def test_rows_on_two_pages_counted_one_by_one(size, begin):
    rows = np.arange(40_960)
    first = begin + rows * size
    two = (first // 4096 != (first + size - 1) // 4096).mean()
    assert pages.crossing(size, begin) == pytest.approx(two, abs=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_checkpoint_lie_on_as_many_pages(tmp_path, form):
    """Every row, where the reader looks for it, against the arithmetic."""
    table = random_table(tmp_path / "table", form, 20_000)
    size, scale = pages.FORMS[form]
    assert table.row_bytes == size + scale and table.rows.row_bytes == size
    _, first = table.rows.place(np.arange(20_000))
    share = (first // 4096 != (first + size - 1) // 4096).mean()
    assert pages.crossings(size)[0] - 1e-3 <= share <= pages.crossings(size)[1] + 1e-3
    assert not scale or not (table.row_scales.place(np.arange(20_000))[1] % scale).any()


def test_shards_are_not_claimed_to_do_what_they_cannot():
    """The aim stays, and is missed; beside it stands what the pages allow."""
    found = {claim["name"]: claim for claim in json.loads(record.RECORD.read_text())["claims"]}
    for form in FORMS:
        for store in ("shards", "flat"):
            aimed = found[f"read from the disk for a decoded token, cold: {store}, {form}"]
            bound = found[f"the same beside the pages that its rows lie on: {store}, {form}"]
            assert aimed["aim"] == 64 and (store == "flat") == (aimed["value"] <= 64)
            assert bound["value"] == aimed["value"] <= bound["aim"]
            # Of 3,200 rows a share lies on two pages that may be four deviations, 0.9 KiB a token, above the arithmetic's.
            assert bound["aim"] <= pages.kib_per_token(form, store)[1] + 0.9
