"""The benchmark of reads on a small table, and what its claims are made of."""

import pytest
import torch

from benchmarks.ple_reads import record
from benchmarks.ple_reads.__main__ import holes
from benchmarks.ple_reads.files import FORMS, random_table
from benchmarks.ple_reads.measure import cases
from benchmarks.ple_reads.step import Steps
from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.models.qwen4_exp.ple_store.flat.writer import flatten
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


def test_percentiles():
    assert record.percentile([3, 1, 2], 0.5) == 2 and record.percentile([3, 1, 2], 0.99) == 3
