"""Where tokens lie, in as many steps as there is room for."""

import torch

from vllm.models.qwen4_exp.qsa import places
from vllm.models.qwen4_exp.qsa.attention import sparse_paged_attention
from vllm.models.qwen4_exp.qsa.formats import INT8
from vllm.models.qwen4_exp.qsa.launch import rows_of

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
