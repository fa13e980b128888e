"""Rows read by offset against the table loaded by safetensors."""

import gc
import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm.models.qwen4_exp.ple_store.errors import RowOutOfRange, RowReadFailed, UnreadableFile
from vllm.models.qwen4_exp.ple_store.gather import TableFiles as Files
from vllm.models.qwen4_exp.ple_store.reads import ReadPool
from vllm.models.qwen4_exp.ple_store.reads.aio import AioQueue
from vllm.models.qwen4_exp.ple_store.reads.plain import PlainQueue
from vllm.models.qwen4_exp.ple_store.reads.spans import Spans
from vllm.models.qwen4_exp.ple_store.reference import LoadedTable

from .steps import answer_with


@pytest.fixture(params=[AioQueue, PlainQueue])
def queue(request):
    return request.param()


@pytest.fixture(autouse=True)
def TableFiles(monkeypatch, queue):  # noqa: N802, stands for the class
    """The class over either queue."""
    made = lambda location: Files(location, ReadPool(queue))  # noqa: E731
    monkeypatch.setitem(globals(), "TableFiles", made)
    return made


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes: rows are copied, so there is no tolerance."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def open_files(folder: Path) -> int:
    """Descriptors of this process that point into ``folder``."""
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum(link.startswith(str(folder)) for link in links)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("parts", [1, 5, 37])
def test_every_row(write_table, dtype, parts):
    fp8 = dtype is torch.float8_e4m3fn
    written = write_table(parts=parts, **({"form": "scaled"} if fp8 else {"dtype": dtype}))
    location = written.locate()
    assert len({shard.rows for shard in location.shards}) == (2 if parts == 5 else 1)  # 8 8 8 8 5
    ids = torch.randperm(37)
    with TableFiles(location) as table:
        got = table.gather(ids)
    assert same(got, LoadedTable(location).gather(ids))
    assert fp8 or same(got, written.values[ids])


def test_random_batches_with_repeats(write_table):
    written = write_table(rows=1000, parts=7)
    location = written.locate()
    loaded = LoadedTable(location)
    with TableFiles(location) as table:
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, 1000, (seed + 1, 4), generator=generator)
            ids[-1] = ids[0]  # a repeated token
            assert same(table.gather(ids), loaded.gather(ids))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_no_ids(write_table, shape):
    with TableFiles(write_table().locate()) as table:
        assert table.gather(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 6)


def test_rows_on_both_sides_of_a_shard_boundary(write_table):
    written = write_table()  # shards start at 0 8 16 24 32, two in a file
    ids = torch.tensor([7, 8, 15, 16, 31, 32, 36, 0])
    with TableFiles(written.locate()) as table:
        assert same(table.gather(ids), written.values[ids])


def test_neighbours_are_one_read(write_table, queue, monkeypatch):
    written = write_table()
    sizes = []
    answer_with(monkeypatch, queue, lambda spans, results: sizes.append(spans.size.tolist()) or results)
    with TableFiles(written.locate()) as table:
        table.gather(torch.tensor([6, 5, 5, 7, 8, 20]))
    # 5-7 end shard 0, and 8 begins the next one behind it in the same file; 20 is alone. A row is 12 bytes.
    assert sizes[0] == [48, 12]


@pytest.mark.parametrize("bad", [-1, 37, 2**40])
def test_row_out_of_range(write_table, bad):
    location = write_table().locate()
    with TableFiles(location) as table, pytest.raises(RowOutOfRange, match=rf"0\.\.36, found row {bad}") as caught:
        table.gather(torch.tensor([3, bad]))
    (lost,) = caught.value.lost
    last = location.shards[-1]
    assert bad < 0 or (lost.path, lost.offset) == (str(last.path), last.offset + (bad - 37 + last.rows) * 12)
    assert caught.value.rows == [bad] and str(lost).endswith("found a table of 37 rows.")


def test_file_cut_while_serving(write_table):
    written = write_table()
    location = written.locate()
    with TableFiles(location) as table:
        os.truncate(location.shards[1].path, location.shards[1].offset + 8 * 12 - 1)
        table.gather(torch.tensor([0]))  # what is still there can still be read
        with pytest.raises(RowReadFailed, match=r"12 bytes at offset \d+, found 11 bytes before the end") as caught:
            table.gather(torch.tensor([15, 0]))
    assert caught.value.rows == [15] and not caught.value.gone
    assert caught.value.path == str(location.shards[1].path)
    assert "Other rows can still be read" in str(caught.value)


def test_disk_error_while_serving(write_table, queue, monkeypatch):
    with TableFiles(write_table().locate()) as table:
        answer_with(monkeypatch, queue, lambda _, results: np.append(results[:-1], -5))
        with pytest.raises(RowReadFailed, match="Input/output error.* Row 30 and 1 more") as caught:
            table.gather(torch.tensor([0, 30, 31]))
    assert caught.value.rows == [30, 31]
    again = pickle.loads(pickle.dumps(caught.value.named(["a", "b"])))
    assert (again.rows, again.requests, str(again)) == ([30, 31], ["a", "b"], str(caught.value.named(["a", "b"])))
    assert "needed by a, b." in str(again)


@pytest.mark.parametrize("most", [1, 5])
def test_partial_reads_are_completed(write_table, queue, monkeypatch, most):
    written = write_table()
    prepare = queue.prepare

    def some(spans, target, nowait):
        return prepare(Spans(spans.fd, spans.offset, np.minimum(spans.size, most), spans.start), target, nowait)

    monkeypatch.setattr(queue, "prepare", some)
    with TableFiles(written.locate()) as table:
        assert same(table.gather(torch.arange(37)), written.values)


def test_file_removed_before_opening(write_table):
    written = write_table()
    location = written.locate()
    written.files[1].unlink()
    with pytest.raises(UnreadableFile, match="No such file"):
        TableFiles(location)
    assert open_files(written.folder) == 0  # those opened before it are closed


def test_descriptors_are_closed(write_table):
    written = write_table()
    location = written.locate()
    assert open_files(written.folder) == 0
    table = TableFiles(location)
    assert open_files(written.folder) == 3  # one a file, not one a shard
    table.close()
    assert open_files(written.folder) == 0
    with pytest.raises(RowReadFailed, match="a closed file"):
        table.gather(torch.tensor([0]))
    dropped = TableFiles(location)
    assert open_files(written.folder) == 3
    del dropped
    gc.collect()
    assert open_files(written.folder) == 0


def test_random_access_is_announced(write_table, monkeypatch):
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, what: advice.append((size, what)))
    with TableFiles(write_table().locate()):
        assert advice == [(0, os.POSIX_FADV_RANDOM)] * 3


def test_threads_share_a_table(write_table):
    written = write_table(rows=1000, parts=7)
    wrong = []

    def work(table: TableFiles, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            ids = torch.randint(0, 1000, (40,), generator=generator)
            if not same(table.gather(ids), written.values[ids]):
                wrong.append(ids)

    with TableFiles(written.locate()) as table:
        threads = [threading.Thread(target=work, args=(table, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_forked_process_reads_and_closes_on_its_own(write_table):
    written = write_table()

    def child(table: TableFiles) -> None:
        assert same(table.gather(torch.arange(37)), written.values)
        table.close()

    with TableFiles(written.locate()) as table:
        process = multiprocessing.get_context("fork").Process(target=child, args=(table,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert same(table.gather(torch.arange(37)), written.values)
