"""Batches of reads: what is cached and what is not, many at a time, and what went wrong with which."""

import ctypes
import errno
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.models.qwen4_exp.ple_store.reads import ReadPool, Spans, aio, pool
from vllm.models.qwen4_exp.ple_store.reads.aio import AioQueue, AioUnavailable
from vllm.models.qwen4_exp.ple_store.reads.plain import PlainQueue
from vllm.models.qwen4_exp.ple_store.reads.pool import threads_for
from vllm.models.qwen4_exp.ple_store.reads.spans import PAGE, coalesce

# Where another process takes the core from a read that does not wait, its page is there when it looks, and counts as cached.
pytestmark = pytest.mark.alone

PAGES = 3000


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A descriptor, and its bytes."""
    path = tmp_path_factory.mktemp("reads") / "file"
    content = np.random.default_rng(0).integers(0, 256, PAGES * PAGE, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    yield descriptor, content
    os.close(descriptor)


@pytest.fixture(params=[AioQueue, PlainQueue])
def queue(request):
    return request.param()


def spans_of(descriptor: int, pages: np.ndarray, size: int = 320) -> Spans:
    return coalesce(np.full(len(pages), descriptor), pages.astype(np.int64) * PAGE, size)[0]


def drop(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def tells(descriptor: int) -> bool:
    """Whether this file system says what is cached, and lets go of it; memory file systems do not."""
    drop(descriptor)
    target = np.empty(320, dtype=np.uint8)
    batch = PlainQueue().prepare(spans_of(descriptor, np.array([7])), target, nowait=True)
    batch.run(0, 1)
    return batch.results()[0] == -errno.EAGAIN


@pytest.mark.parametrize("count", [1, 16, 700, 2500])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_span(file, queue, count, threads):
    descriptor, content = file
    pages = np.sort(np.random.default_rng(count).choice(PAGES, count, replace=False))
    spans = spans_of(descriptor, pages)
    target = np.zeros(count * 320, dtype=np.uint8)
    reader = ReadPool(queue, threads)
    outcome = reader.read(spans, target)
    assert (outcome.results == spans.size).all()
    assert np.array_equal(target.reshape(count, 320), content.reshape(PAGES, PAGE)[pages, :320])
    reader.close()


def test_what_is_cached(file, queue):
    descriptor, content = file
    if not tells(descriptor):
        pytest.skip("this file system does not tell")
    drop(descriptor)
    hot, all_ = np.array([3, 500, 900]), np.array([3, 4, 500, 700, 900])
    target = np.zeros(5 * 320, dtype=np.uint8)
    reader = ReadPool(queue)
    reader.read(spans_of(descriptor, hot), target)
    outcome = reader.read(spans_of(descriptor, all_), target)
    assert outcome.cached.tolist() == [True, False, True, False, True]
    assert outcome.disk_bytes == 2 * PAGE
    assert np.array_equal(target.reshape(5, 320), content.reshape(PAGES, PAGE)[all_, :320])
    assert reader.read(spans_of(descriptor, all_), target).cached.all()


def test_what_was_read_from_the_disk_is_what_is_counted(file, queue):
    """The kernel's own count, of this process: no readahead, no page twice."""
    descriptor, _ = file
    if not tells(descriptor):
        pytest.skip("this file system does not tell")
    drop(descriptor)
    pages = np.arange(0, PAGES, 5)
    before = disk_bytes()
    outcome = ReadPool(queue, 1).read(spans_of(descriptor, pages), np.zeros(len(pages) * 320, dtype=np.uint8))
    assert outcome.disk_bytes == len(pages) * PAGE
    assert disk_bytes() - before == len(pages) * PAGE


def disk_bytes() -> int:
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["read_bytes"])


def test_a_file_system_that_does_not_tell(file, monkeypatch):
    descriptor, content = file
    queue = PlainQueue()
    real = queue.prepare
    refused = SimpleNamespace(run=lambda begin, end: None, results=lambda: np.full(2, -errno.EOPNOTSUPP))
    monkeypatch.setattr(
        queue, "prepare", lambda spans, target, nowait: refused if nowait else real(spans, target, False)
    )
    target = np.zeros(2 * 320, dtype=np.uint8)
    outcome = ReadPool(queue).read(spans_of(descriptor, np.array([1, 2])), target)
    assert outcome.cached is None and outcome.disk_bytes == 0 and (outcome.results == 320).all()
    assert np.array_equal(target.reshape(2, 320), content.reshape(PAGES, PAGE)[1:3, :320])


class Moves:
    """A queue, and the advice that goes to the kernel, in the order in which they come; ``hot`` pages are cached."""

    def __init__(self, monkeypatch, hot: set[int]) -> None:
        self.hot, self.log, self.threads = hot, [], set()
        monkeypatch.setattr(pool.os, "posix_fadvise", lambda fd, offset, size, advice: self._note(offset, size, advice))

    def _note(self, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and size == 320
        self.log.append(("advised", offset // PAGE))

    def prepare(self, spans: Spans, target: np.ndarray, nowait: bool) -> SimpleNamespace:
        pages = (spans.offset // PAGE).tolist()

        def run(begin: int, end: int) -> None:
            self.threads.add(threading.current_thread().name)
            self.log += [("asked" if nowait else "read", page) for page in pages[begin:end]]

        answers = [-errno.EAGAIN if nowait and page not in self.hot else 320 for page in pages]
        return SimpleNamespace(run=run, results=lambda: np.array(answers))


def test_the_kernel_hears_of_all_that_is_missing_before_any_of_it_is_read(monkeypatch):
    queue = Moves(monkeypatch, hot={3, 900})
    outcome = ReadPool(queue).read(spans_of(0, np.array([3, 4, 500, 900])), np.zeros(4 * 320, dtype=np.uint8))
    asked = [("asked", page) for page in (3, 4, 500, 900)]
    assert queue.log == [*asked, ("advised", 4), ("advised", 500), ("read", 4), ("read", 500)]
    assert outcome.cached.tolist() == [True, False, False, True] and outcome.disk_bytes == 2 * PAGE


def test_where_nobody_tells_the_kernel_hears_of_everything(monkeypatch):
    queue = Moves(monkeypatch, hot={4, 500})
    reader = ReadPool(queue)
    reader._tells = False
    reader.read(spans_of(0, np.array([4, 500])), np.zeros(2 * 320, dtype=np.uint8))
    assert queue.log == [("advised", 4), ("advised", 500), ("read", 4), ("read", 500)]


def test_a_large_batch_is_shared_out_and_the_threads_end(monkeypatch):
    queue = Moves(monkeypatch, hot=set(range(PAGES)))
    barrier = threading.Barrier(3, timeout=30)
    real = queue.prepare

    def prepare(*given, **named) -> SimpleNamespace:
        batch = real(*given, **named)
        # No thread may take a second part before each has one.
        return SimpleNamespace(run=lambda *part: (barrier.wait(), batch.run(*part)), results=batch.results)

    monkeypatch.setattr(queue, "prepare", prepare)
    reader = ReadPool(queue, 3)
    outcome = reader.read(spans_of(0, np.arange(3 * 512)), np.zeros(3 * 512 * 320, dtype=np.uint8))
    assert (outcome.results == 320).all() and len(queue.threads) == 3
    assert sorted(page for _, page in queue.log) == list(range(3 * 512))
    threads = list(reader._pool._threads)
    reader.close()
    assert not any(thread.is_alive() for thread in threads)


def test_errors_are_those_of_their_spans(file, queue):
    """A closed descriptor in the middle of a batch, and a span behind the end of the file."""
    descriptor, content = file
    closed = os.dup(descriptor)
    os.close(closed)
    fd = np.array([descriptor, closed, descriptor, closed, descriptor])
    offset = np.array([0, PAGE, 2 * PAGE, 3 * PAGE, PAGES * PAGE - 100])
    spans = Spans(fd, offset, np.full(5, 320), np.arange(5) * 320)
    target = np.zeros(5 * 320, dtype=np.uint8)
    results = ReadPool(queue).read(spans, target).results
    assert results.tolist() == [320, -errno.EBADF, 320, -errno.EBADF, 100]
    assert np.array_equal(target[:320], content[:320]) and np.array_equal(target[640:960], content[2 * PAGE :][:320])


def test_errors_in_parts_of_several_threads_and_several_calls(monkeypatch, file):
    """A refused read takes no answer's place, wherever its part begins."""
    descriptor, content = file
    monkeypatch.setattr(aio, "_DEPTH", 100)
    pages, closed = np.arange(1200), os.dup(descriptor)
    os.close(closed)
    spans = spans_of(descriptor, pages)
    bad = pages % 7 == 3
    spans.fd[bad] = closed
    target = np.zeros(len(pages) * 320, dtype=np.uint8)
    results = ReadPool(AioQueue(), 2).read(spans, target).results
    assert np.array_equal(results, np.where(bad, -errno.EBADF, 320))
    assert np.array_equal(target.reshape(-1, 320)[~bad], content.reshape(PAGES, PAGE)[pages[~bad], :320])


def test_a_queue_is_as_deep_as_the_kernel_has_room_for(monkeypatch):
    """fs.aio-max-nr is shared by a machine's threads: a smaller queue reads the same in more calls."""
    asked = []

    def setup(number, depth, context=None) -> int:
        if context is None:
            return 0  # given back
        asked.append(depth.value)
        ctypes.set_errno(errno.EAGAIN)
        return 0 if depth.value <= room else -1

    monkeypatch.setattr(aio, "_call", setup)
    room = 600
    assert aio.Context(206, 207, 2048).depth == 512 and asked == [2048, 512]
    room = 0
    with pytest.raises(AioUnavailable, match="io_setup"):
        aio.Context(206, 207, 2048)
    assert asked[2:] == [2048, 512, 128]


@pytest.mark.parametrize("threads", [1, 2, 4, 8, 12, 16])
def test_two_engines_have_queues_on_one_machine(threads):
    """Beside the threads of a pool the engine's own reads, and the one that reads ahead."""
    assert 2 * (threads + 2) * AioQueue(threads).context().depth <= 65536


def test_no_part_is_left_running_when_one_has_failed(file):
    """The target is the caller's again when ``read`` has ended."""
    descriptor, _ = file
    ended = []

    def run(begin: int, end: int) -> None:
        if begin == 0:
            raise ZeroDivisionError
        time.sleep(0.2)
        ended.append(begin)

    queue = SimpleNamespace(prepare=lambda *_: SimpleNamespace(run=run))
    with pytest.raises(ZeroDivisionError):
        ReadPool(queue, 2).read(spans_of(descriptor, np.arange(1024)), np.empty(0, dtype=np.uint8))
    assert ended == [512]


def test_without_the_kernels_batches(monkeypatch, file):
    def refuse(*_):
        raise AioUnavailable(errno.EPERM, "not here")

    monkeypatch.setattr(pool, "AioQueue", refuse)
    assert isinstance(ReadPool().queue, PlainQueue)
    monkeypatch.setattr(aio.platform, "machine", lambda: "riscv64")
    with pytest.raises(AioUnavailable, match="riscv64"):
        AioQueue()


def test_a_thread_for_which_the_kernel_has_no_queue(monkeypatch, file):
    """Found out in the middle of serving: reads go on one by one."""
    descriptor, content = file
    reader = ReadPool(AioQueue(), 1)

    def refuse(*_):
        raise AioUnavailable(errno.EAGAIN, "io_setup")

    monkeypatch.setattr(reader.queue, "context", refuse)
    target = np.zeros(320, dtype=np.uint8)
    assert reader.read(spans_of(descriptor, np.array([9])), target).results.tolist() == [320]
    assert isinstance(reader.queue, PlainQueue) and np.array_equal(target, content[9 * PAGE :][:320])


def test_neighbours_on_disk_are_one_span():
    fd = np.array([5, 5, 5, 6, 6, 5])
    offset = np.array([0, 10, 30, 40, 50, 60])
    spans, first = coalesce(fd, offset, 10)
    assert spans.size.tolist() == [20, 10, 20, 10] and spans.start.tolist() == [0, 20, 30, 50]
    assert first.tolist() == [0, 2, 3, 5, 6]
    assert len(coalesce(fd[:0], offset[:0], 10)[0]) == 0


def test_pages_are_counted_once():
    spans = Spans(np.array([3, 3, 3, 4]), np.array([0, 100, 4000, 4000]), np.array([10, 10, 200, 10]), np.zeros(4))
    assert spans.pages.tolist() == [1, 1, 2, 1]
    assert pool._pages(spans) == 3  # the first two spans share theirs, the third has one of its own, the fourth too


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 2), (4, 4), (8, 4), (16, 8), (24, 12), (64, 16)])
def test_threads_leave_the_engine_its_processors(processors, threads):
    assert threads_for(processors) == threads
