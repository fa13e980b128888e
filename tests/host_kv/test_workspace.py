"""What sections need beside their arena is what the memory profile takes for them: counted, operation by operation."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.models.qwen4_exp.qsa.host_kv import arena, numbering

CONTEXT, BUDGET, RATIO = 262_144, 2048, 4
HEADS, DIM = 24, 256
#: groups of bf16 rows in half of an arena of 96 MiB
SECTION = 48 * 2**20 // (RATIO * 2048)


class Peak(TorchDispatchMode):
    """Bytes of tensors that are alive at once, at most; of views only what they are views of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = {self._key(tensor) for tensor in self._tensors((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        for tensor in self._tensors(result):
            key, size = self._key(tensor), tensor.untyped_storage().nbytes()
            if key not in self._users:
                if key in given:
                    continue  # made before, by others
                self._users[key] = 0
                self.now += size
            self._users[key] += 1
            weakref.finalize(tensor, self._drop, key, size)
        self.most = max(self.most, self.now)
        return result

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.now -= size

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    @staticmethod
    def _tensors(tree) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class NotLaunched:
    """A kernel, which takes no memory that torch does not give it."""

    def __getitem__(self, grid):
        return lambda *given, **named: None


@pytest.mark.parametrize(
    ("tokens", "block", "pool"),
    [(300, 12_528, 6_400_000), (512, 12_528, 6_400_000), (512, 25_056, 2_881_440), (64, 12_528, 6_400_000)],
    ids=["an uneven chunk", "as large as the profile knows", "six cards", "few tokens"],
)
def test_the_profile_takes_what_numbering_takes(monkeypatch, tokens, block, pool):
    """The published geometry at its longest context, with pools of 400 MB on six cards and of as many tokens as counted."""
    for name in [name for name in vars(numbering) if name.endswith("_kernel")]:
        monkeypatch.setattr(numbering, name, NotLaunched())
    blocks = pool // block
    selected = torch.full((tokens, BUDGET + RATIO), BUDGET, dtype=torch.int32)
    table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[: -(-CONTEXT // block)].unsqueeze(0)
    request = torch.zeros(tokens, dtype=torch.int32)
    count = -(-(CONTEXT // RATIO + tokens) // SECTION)
    with Peak() as taken:
        union = numbering.union_of(selected, table, request, block, blocks * block // RATIO, count * SECTION, RATIO)
        edges = numbering.edges_of_sections(union.numbers, SECTION * RATIO, count)
    assert edges.shape == (count, tokens, 2)
    layer = SimpleNamespace(indexer=SimpleNamespace(packed_output_width=BUDGET + RATIO), num_heads=HEADS, head_dim=DIM)
    counted = arena.workspace_bytes(layer, tokens) - tokens * HEADS * DIM * 4
    assert counted / 2 < taken.most <= counted, f"{taken.most / 1e6:.1f} MB taken, {counted / 1e6:.1f} MB counted"


def test_the_count_is_of_what_is_alive():
    """A product known in advance: two operands and a result, of which one operand goes before."""
    with Peak() as taken:
        first = torch.ones(1000)
        second = first + 1
        del first
        third = second.view(10, 100) * 2
    assert taken.most == 8000 and taken.now == 8000 and third.shape == (10, 100)
