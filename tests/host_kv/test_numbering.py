"""The kernels that number a chunk's rows, interpreted, against the same in torch: equal to the last number."""

from __future__ import annotations

import random

import pytest
import torch

from vllm.models.qwen4_exp.qsa.host_kv import numbering, union_reference
from vllm.models.qwen4_exp.qsa.host_kv.union import BEYOND
from vllm.triton_utils import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, interpreted on the CPU")

RATIO = 4
#: What stands where nothing was written, and where nothing may be read.
GARBAGE = -(2**30)


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """Memory that torch gives is not empty."""

    def empty(*shape, **how):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, GARBAGE, **how)

    monkeypatch.setattr(torch, "empty", empty)


class Chunk:
    """Tokens of requests of which some begin alike, in blocks of a pool in random order."""

    def __init__(self, seed: int, lengths: list[int], shared: int, tokens: int, block: int, width: int) -> None:
        dice = random.Random(seed)
        pages = [-(-length // block) for length in lengths]
        self.blocks = sum(pages) + 3
        free = dice.sample(range(self.blocks), self.blocks)
        common, self.block = [free.pop() for _ in range(shared)], block
        # A table is wider than its requests are long, and names anything there.
        self.table = torch.full((len(lengths), max(pages) + 2), 10**6, dtype=torch.int32)
        for row, count in enumerate(pages):
            own = common[: min(shared, count)]
            own = own + [free.pop() for _ in range(count - len(own))]
            self.table[row, :count] = torch.tensor(own, dtype=torch.int32)
        self.selected = torch.full((tokens, width + 1), GARBAGE, dtype=torch.int32)
        self.owner = torch.tensor([dice.randrange(len(lengths)) for _ in range(tokens)], dtype=torch.int32)
        for row, request in enumerate(self.owner.tolist()):
            count = dice.choice([0, 1, width, dice.randrange(width + 1)])
            positions = sorted(dice.sample(range(lengths[request]), min(count, lengths[request])))
            self.selected[row, : len(positions)] = torch.tensor(positions, dtype=torch.int32)
            self.selected[row, -1] = len(positions)

    def union(self, module):
        limit = self.blocks * self.block // RATIO
        return module.union_of(self.selected, self.table, self.owner, self.block, limit, limit, RATIO)


CHUNKS = {
    "one request": (1, [200], 0, 7, 32, 45),
    "one token": (2, [3], 0, 1, 32, 45),
    "prefixes": (3, [70, 33, 130, 64], 2, 11, 32, 45),
    "a block of more groups than a program": (4, [2 * 60, 60], 1, 5, 60, 30),
    "a width of several programs": (5, [90], 0, 4, 32, 75),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several programs, and several turns of one, at sizes that are soon interpreted."""
    for name, size in (("_COLUMNS", 32), ("_GROUPS", 8), ("_PLACES", 4), ("_EDGES", 4)):
        monkeypatch.setattr(numbering, name, size)


@pytest.mark.parametrize("name", CHUNKS)
def test_numbers_are_those_of_the_reference(name):
    chunk = Chunk(*CHUNKS[name])
    expected, found = chunk.union(union_reference), chunk.union(numbering)
    size = int(expected.size)
    assert int(found.size) == size and size > 0
    assert torch.equal(found.groups[:size], expected.groups[:size])
    assert torch.equal(found.numbers, expected.numbers)
    for row in found.numbers.tolist():
        assert row[: row[-1]] == sorted(row[: row[-1]]) and set(row[row[-1] : -1]) <= {BEYOND}


def test_tokens_that_select_nothing():
    chunk = Chunk(*CHUNKS["prefixes"])
    chunk.selected[:, -1] = 0
    found = chunk.union(numbering)
    assert int(found.size) == 0 and (found.numbers[:, :-1] == BEYOND).all() and not found.numbers[:, -1].any()


@pytest.mark.parametrize(("size", "count"), [(4, 1), (4, 9), (7, 5), (1000, 2), (2**28, 7)])
@pytest.mark.parametrize("tokens", [1, 6])
def test_edges_are_those_of_the_reference(tokens, size, count):
    """Up to the largest number that an int32 holds; lists of any length, one of them full, and their rows aligned."""
    torch.manual_seed(size)
    numbers = torch.full((tokens, 38), BEYOND, dtype=torch.int32)
    for row in range(tokens):
        many = (37, 0, 1, 20, 36, 5)[row]
        numbers[row, :many] = torch.randint(0, min(count * size, BEYOND), (many,)).sort().values
        numbers[row, -1] = many
    expected = union_reference.edges_of_sections(numbers, size, count)
    found = numbering.edges_of_sections(numbers, size, count)
    assert found.shape == (count, tokens, 2) and torch.equal(found, expected)
    assert all(found[section].is_contiguous() and found[section].data_ptr() % 16 == 0 for section in range(count))
