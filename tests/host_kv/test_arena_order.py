"""Two streams take turns with two halves: what must come first does, by events alone. No GPU: streams that only note.

Each piece of work knows what it waits for; what is not reachable from it may run at any time.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from vllm.models.qwen4_exp.qsa.host_kv import arena as module
from vllm.models.qwen4_exp.qsa.host_kv.arena import Arena

ROW = 64


class Work:
    def __init__(self, name, before):
        self.name, self.before = name, before

    def follows(self, other: Work) -> bool:
        return any(work is other or work.follows(other) for work in self.before)


class Stream:
    def __init__(self):
        self.queue, self.waits = [], []

    def run(self, name) -> Work:
        self.queue.append(Work(name, [*self.queue[-1:], *self.waits]))
        self.waits = []
        return self.queue[-1]

    def wait_stream(self, other: Stream):
        self.waits += other.queue[-1:]

    def wait_event(self, event: Event):
        self.waits += event.work


class Event:
    def __init__(self):
        self.work = []

    def record(self, stream: Stream):
        self.work = [*stream.queue[-1:], *stream.waits]


class Listed:
    """A tensor that two streams use."""

    def __init__(self):
        self.kept_for = []

    def record_stream(self, stream):
        self.kept_for.append(stream)


@pytest.fixture
def gpu(monkeypatch):
    """(arena, main stream, what was copied to each half: section's first row -> work, in order)."""
    main, side, copied = Stream(), Stream(), []
    made = Arena.__new__(Arena)
    made._halves = torch.empty(2, 4 * ROW, dtype=torch.uint8)
    made._stream = side
    made._arrived, made._read = [Event(), Event()], [Event(), Event()]
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(module.torch.cuda, "stream", lambda stream: nullcontext())

    def copy_rows(host, slots, size, first, half):
        number = [half.data_ptr() == each.data_ptr() for each in made.halves(ROW)].index(True)
        copied.append((number, first // half.shape[0], side.run(("copy", number, first))))

    monkeypatch.setattr(module, "copy_rows", copy_rows)
    return made, main, copied


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6])
def test_everything_that_must_comes_first(gpu, count):
    arena, main, copied = gpu
    host, reads = torch.empty(9, ROW, dtype=torch.uint8), []
    for layer in range(3):
        written = main.run(("rows of the step are written", layer))
        slots, size = Listed(), Listed()
        begun = len(copied)
        for section in arena.sections(host, slots, size, count):
            (half, copy) = next((h, work) for h, number, work in copied[begun:] if number == section)
            read = main.run(("read", layer, section))
            assert half == section % 2 and read.follows(copy), "read before it has arrived"
            assert copy.follows(written), "copied before it was written"
            reads.append((half, copy, read))
        assert slots.kept_for == size.kept_for == [arena._stream]
        assert [number for _, number, _ in copied[begun:]] == list(range(count))
    for (half, _, read), (later_half, later, _) in [(a, b) for i, a in enumerate(reads) for b in reads[i + 1 :]]:
        assert half != later_half or later.follows(read), "overwritten while it is read"


def test_the_next_section_is_copied_while_one_is_read(gpu):
    """What all this is for: nothing makes a copy wait for the section before it."""
    arena, main, copied = gpu
    main.run("before")
    for section in arena.sections(torch.empty(9, ROW, dtype=torch.uint8), Listed(), Listed(), 4):
        read = main.run(("read", section))
        beside = [work for _, number, work in copied if number == section + 1]
        assert section == 3 or (beside and not beside[0].follows(read) and not read.follows(beside[0]))
