"""Rows read ahead are the same rows, whoever they were meant for."""

import threading

import numpy as np
import pytest
import torch

from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.models.qwen4_exp.ple_store.errors import RowReadFailed
from vllm.models.qwen4_exp.ple_store.fetch import RowFetcher
from vllm.models.qwen4_exp.ple_store.reader import TableReader

ROWS = 1000


@pytest.fixture
def made(write_table):
    """A fetcher, and the table's rows as bytes."""
    written = write_table(rows=ROWS, dim=8)
    counters = Counters()
    fetcher = RowFetcher(TableReader(written.table(), counters=counters), counters)
    yield fetcher, written.values.contiguous().view(torch.uint8)
    fetcher.close()


def ids_of(seed: int, shape=(20, 4)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, ROWS, shape)


@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_with_any_part_read_ahead(made, share):
    fetcher, values = made
    for seed in range(20):
        ids = ids_of(seed)
        ahead = np.concatenate((ids.ravel()[: int(ids.size * share)], ids_of(seed + 100).ravel()))
        fetcher.read_ahead(lambda ids=ahead: ids)
        fetcher._ahead.records.result()
        assert torch.equal(fetcher.fetch(ids).records(), values[ids])
    assert fetcher.counters.ahead_rows > (0 if share else -1)


def test_nothing_ahead_and_nothing_wanted(made):
    fetcher, values = made
    fetcher.read_ahead(lambda: np.empty((0, 4), dtype=np.int64))
    assert torch.equal(fetcher.fetch(ids_of(1)).records(), values[ids_of(1)])
    assert fetcher.fetch(np.empty((0, 4), dtype=np.int64)).records().shape == (0, 4, 16)


def test_another_step_does_not_wait_for_a_long_chunk(made, monkeypatch):
    fetcher, values = made
    read, go, caller = fetcher.store.read, threading.Event(), threading.get_ident()

    def slow(wanted):
        # Only the other thread is held up.
        assert threading.get_ident() == caller or go.wait(20)
        return read(wanted)

    monkeypatch.setattr(fetcher.store, "read", slow)
    chunk = ids_of(0, (200, 4))
    fetcher.read_ahead(lambda: chunk)
    while fetcher._ahead.asked is None:
        pass
    others = np.setdiff1d(np.arange(ROWS), chunk)[:16].reshape(4, 4)
    assert torch.equal(fetcher.fetch(others).records(), values[others])
    assert not fetcher._ahead.records.done() and fetcher.counters.ahead_rows == 0
    threading.Timer(0.1, go.set).start()
    assert torch.equal(fetcher.fetch(chunk).records(), values[chunk])
    assert fetcher.counters.ahead_rows == len(np.unique(chunk))


def test_few_of_many_rows_read_ahead_travel_alone(made):
    """A part goes to the device as it is: all of a chunk for the chunk, and not for somebody who wants eight of it."""
    fetcher, values = made
    chunk = ids_of(0, (200, 4))
    fetcher.read_ahead(lambda: chunk)
    fetcher._ahead.records.result(20)
    for wanted, rows in ((chunk.reshape(-1)[:8], 8), (chunk, len(np.unique(chunk)))):
        fetched = fetcher.fetch(wanted)
        assert [len(part) for part in fetched.parts] == [len(np.unique(wanted))] and len(np.unique(wanted)) <= rows
        assert torch.equal(fetched.records(), values[wanted])
    (thread,) = fetcher._thread._threads
    fetcher.close()
    assert not thread.is_alive()


def test_a_step_that_was_foreseen_is_not_sorted_again(made, monkeypatch):
    """Sorting a chunk and looking for it took the engine's own thread 1 ms a chunk of 2048 tokens (EPYC)."""
    fetcher, values = made
    chunk = ids_of(0, (200, 4))
    fetcher.read_ahead(lambda: chunk)
    fetcher._ahead.records.result(20)
    with monkeypatch.context() as held:
        held.setattr(np, "unique", None)
        fetched = fetcher.fetch(chunk.copy())
    assert torch.equal(fetched.records(), values[chunk])
    assert fetcher.counters.ahead_rows == fetcher.counters.unique_rows == len(np.unique(chunk))
    # Of another shape, or with one other row, it is another step.
    other = chunk.copy()
    other[7, 2] += 1
    for ids in (chunk.reshape(100, 8), other % ROWS):
        assert torch.equal(fetcher.fetch(ids).records(), values[ids])


def test_what_could_not_be_read_ahead_is_read_again(made, monkeypatch):
    fetcher, values = made
    read = fetcher.store.read
    monkeypatch.setattr(fetcher.store, "read", lambda wanted: (_ for _ in ()).throw(RowReadFailed("f", 1, 0)))
    fetcher.read_ahead(lambda: ids_of(3))
    assert fetcher._ahead.records.result() is None
    with pytest.raises(RowReadFailed):
        fetcher.fetch(ids_of(3))
    monkeypatch.setattr(fetcher.store, "read", read)
    assert torch.equal(fetcher.fetch(ids_of(3)).records(), values[ids_of(3)])


def test_what_is_counted(made):
    fetcher, _ = made
    ids = np.array([[1, 1, 7, 9], [1, 7, 500, 500]])
    fetcher.fetch(ids)
    fetcher.fetch(ids)
    counted = fetcher.counters.snapshot()
    assert (counted["steps"], counted["rows"], counted["unique_rows"]) == (2, 16, 8)
    assert counted["requested_bytes"] == 8 * 16
    assert counted["row_wait_seconds"] > 0
    assert counted["cached_reads"] + counted["missed_reads"] in (8, 0)  # 0 where the kernel does not tell
