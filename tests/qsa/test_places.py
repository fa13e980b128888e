"""Where tokens lie, in as many steps as there is room for."""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import launch, places
from vllm.models.qwen4_exp.qsa.attention import sparse_paged_attention
from vllm.models.qwen4_exp.qsa.formats import INT8
from vllm.models.qwen4_exp.qsa.launch import WrongInput, rows_of
from vllm.triton_utils import tl, triton

from .scene import scene


def small_workspace(monkeypatch, made, rows: int) -> torch.Tensor:
    space = torch.full(
        (rows * (32 * -(-(made.selected.shape[1] - 1) // 32) + 2 * 16) + 1,), 2**31 - 1, dtype=torch.int32
    )
    monkeypatch.setattr(places, "indexer_workspace", lambda device, row_bytes: space)
    return space


def test_places_are_block_and_place(monkeypatch):
    made = scene(INT8, [5, 0, 20], width=24, size=48)
    made.selected[0, 3] = 2**30
    made.block_table[2, 0] = -1
    small_workspace(monkeypatch, made, 2)
    keys, values, selected, table, owners = made.paged
    rows = rows_of(keys, values, *(made.stored[name] for name in ("key_scales", "value_scales")))
    per_block, per_token = rows.layout.block_units, rows.layout.token_units
    assert rows.layout.unit * per_block == made.cache.stride(0) // 4 and rows.layout.unit * per_token == 136 // 4
    steps = [(part, found.clone()) for part, found in places.placed(rows, selected, table, owners, 16)]
    assert [part for part, _ in steps] == [slice(0, 2), slice(2, 3)]
    found = torch.cat([each for _, each in steps])
    for row, count in enumerate((5, 0, 20)):
        for column, token in enumerate(selected[row, :count].tolist()):
            block = int(table[row, token // 48]) if token < 96 else -1
            assert found[row, column] == (block * per_block + token % 48 * per_token if block >= 0 else -1)
        assert (found[row, count:] == -1).all() and len(found[row]) >= 24 + 2 * 16


def test_a_section_has_its_columns_only(monkeypatch):
    made = scene(INT8, [20], width=24)
    small_workspace(monkeypatch, made, 1)
    keys, values, *rest = made.paged
    rows = rows_of(keys, values, *(made.stored[name] for name in ("key_scales", "value_scales")))
    ((_, found),) = places.placed(rows, *rest, 16, torch.tensor([[3, 9]], dtype=torch.int32))
    assert (found[0] >= 0).nonzero().flatten().tolist() == [3, 4, 5, 6, 7, 8]


def test_rows_in_steps_are_the_same_rows(monkeypatch):
    made = scene(INT8, [40, 3, 67, 9, 0], width=67)
    whole = made.call(sparse_paged_attention, True)
    small_workspace(monkeypatch, made, 2)
    assert torch.equal(made.call(sparse_paged_attention, True), whole)


def untouched(blocks: int, size: int, block_words: int, head_words: int = 33) -> tuple[torch.Tensor, ...]:
    """Keys, values and scales of int8 rows, two heads of 64 and a scale each, that take no memory."""
    rows = torch.empty_strided(
        (blocks, size, 2, 64), (4 * block_words, 4 * 67, 4 * head_words, 1), dtype=torch.int8, device="meta"
    )
    scales = torch.empty_strided((blocks, size, 2), (block_words, 67, head_words), device="meta")
    return rows, rows, scales, scales


@pytest.mark.parametrize(
    "block_words, last, bits",
    [(2**31 - 1 - 67 * 47, 2**31 - 1, 0), (2**31 - 67 * 47, 2**31, 6), (10_000_000_019, 10_000_000_019 + 67 * 47, 6)],
)
def test_places_of_the_last_block(block_words, last, bits):
    """The farthest row that an int32 reaches, the next, and one that is farther by itself than an int32 reaches."""
    rows = rows_of(*untouched(2, 48, block_words))
    assert rows.layout.unit == 1 and rows.layout.within_bits == bits
    selected = torch.tensor([[0, 47, 48, 95, 96, 5]], dtype=torch.int32)
    table, owner = torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ((_, found),) = places.placed(rows, selected, table, owner, 16)
    assert found.dtype == torch.int32
    assert found[0, :5].tolist() == ([0, 47, 64, 64 + 47, -1] if bits else [0, 67 * 47, block_words, last, -1])
    assert row_offsets(rows.layout, found[0, :4]) == [0, 67 * 47, block_words, last]


def row_offsets(layout: launch.Layout, found: torch.Tensor) -> list[int]:
    """``places.row_at`` of four places."""
    offsets = torch.empty(4, dtype=torch.int64)
    row_at_kernel[(1,)](offsets, found, LAYOUT=layout)
    return offsets.tolist()


@triton.jit
def row_at_kernel(offsets, found, LAYOUT: tl.constexpr):
    each = tl.arange(0, 4)
    tl.store(offsets + each, places.row_at(tl.load(found + each), LAYOUT))


def test_blocks_of_one_token_have_places_too():
    assert rows_of(*untouched(2**20, 1, 4097)).layout.within_bits == 1


def test_heads_may_be_as_far_apart_as_anything():
    assert rows_of(*untouched(2, 48, 67 * 48, 2**31 - 1)).layout.within_bits == 0
    assert rows_of(*untouched(2, 48, 67 * 48, 2**31)).layout.within_bits == 6


def test_more_blocks_than_places_have_numbers_for():
    assert rows_of(*untouched(2**25, 48, 67 * 48 + 1)).layout.within_bits == 6
    with pytest.raises(WrongInput, match="blocks of 48 tokens: expected 33554432 at most, got 33554433"):
        rows_of(*untouched(2**25 + 1, 48, 67 * 48 + 1))
