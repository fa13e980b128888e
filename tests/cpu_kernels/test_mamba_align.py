"""Recurrent state between blocks: both window layouts, speculation, padded pages."""

import numpy as np
import pytest
import torch

MAX_REQS, COLUMNS, BLOCKS, BLOCK_SIZE = 6, 8, 40, 4
WINDOW, CHANNELS = 5, 11


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def states(rng, addresses, channels_first: bool):
    """Two groups: a bf16 window and a float32 state with padded pages; an fp8 window.

    Returns the twelve arguments that describe them, and the memory behind.
    """
    memory, fields = [], []

    def add(item: int, tokens: int, inner: int, group: int) -> None:
        rows = CHANNELS if tokens else 0
        page = item * (inner if tokens == 0 else tokens * inner * (rows if channels_first else 1))
        stride = page + 8 * item
        pool = torch.from_numpy(rng.integers(0, 255, BLOCKS * stride, dtype=np.uint8))
        memory.append(pool)
        described = (rows, item * tokens) if channels_first else (0, 0)
        fields.append((pool.data_ptr(), stride, item, inner, tokens, group, *described))

    inner = 1 if channels_first else CHANNELS
    add(2, WINDOW, inner, 0)
    add(4, 0, 37, 0)
    add(1, WINDOW, inner, 1)
    kinds = [torch.int64, torch.int64, torch.int32, torch.int64, torch.int32, torch.int32, torch.int32, torch.int64]
    # Distinct blocks, so that the order in which requests are copied does not matter.
    block_ids = rng.permutation(BLOCKS)[: 4 * COLUMNS].reshape(4, COLUMNS).astype(np.int32)
    block_ids = np.concatenate([block_ids, np.zeros((MAX_REQS - 4, COLUMNS), np.int32)])
    tables = [torch.from_numpy(block_ids[:, ::step].copy()) for step in (1, -1)]
    where = addresses(tables, torch.int64)
    described = [torch.tensor(f, dtype=k) for f, k in zip(zip(*fields, strict=True), kinds, strict=True)]
    return [where, COLUMNS, *described], memory, [where, described[0]]


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_preprocess(compare, make_case, filled, rows):
    slots = rows + 3

    def build(rng):
        order = torch.from_numpy(rng.permutation(slots)[:rows].astype(np.int32))
        computed = torch.from_numpy(rng.integers(0, 30, slots, dtype=np.int32))
        columns = (computed - 1) // BLOCK_SIZE  # -1 where nothing is computed
        bounds = i32(0, *np.cumsum(rng.integers(1, 9, rows)))
        accepted = torch.from_numpy(rng.integers(0, 4, slots, dtype=np.int32))
        args = [order, columns, computed, bounds, accepted, filled(slots), filled(slots), rows]
        return make_case(args, {"BLOCK_SIZE": 256, "MAMBA_BLOCK_SIZE": BLOCK_SIZE})

    compare("preprocess_mamba_align_fused_kernel", ((rows + 255) // 256,), build)


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("mapping", [(3, 0, -1, 2, 1), None])
def test_precopy(compare, make_case, addresses, channels_first, tiles, mapping):
    def build(rng):
        described, memory, hidden = states(rng, addresses, channels_first)
        # Slot 0 moves on, 1 is new, 2 stays, 3 moves with two speculated tokens; 5, the
        # last one, would move too, if -1 were taken for it.
        args = [i32(2, 1, 4, 3, 0, 3), i32(1, -1, 4, 2, -1, 2), i32(0, 0, 1, 2, 0, 0), *described]
        args += [i32(*mapping) if mapping else None, 5 if mapping else 4]
        constants = {"COPY_BLOCK_SIZE": 16, "CONV_STATE_DIM_FIRST": channels_first}
        constants |= {"HAS_IDX_MAPPING": mapping is not None, "TEMPORAL_TILES": tiles}
        return make_case(args, constants, memory, hidden)

    compare("precopy_mamba_align_fused_kernel", (5, 3, tiles), build)


# Accepted tokens, column, tokens after the step, for each slot: ends a block in its own
# column; within a block; passed a block's end by two of four accepted tokens, from its own
# and from another column; within the first block; and the last slot, which -1 must not mean.
STEPS = [(1, 1, 8), (1, 2, 10), (4, 1, 10), (4, 2, 10), (1, 0, 1), (3, 1, 10)]


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("precomputed", [False, True])
@pytest.mark.parametrize("slots", [(0, 1, 2), (3, -1), (2,), (1, 4), None])
def test_postprocess(compare, make_case, addresses, filled, channels_first, precomputed, slots):
    def build(rng):
        described, memory, hidden = states(rng, addresses, channels_first)
        accepted, columns, after = (i32(*values) for values in zip(*STEPS))
        scheduled, drafts = torch.full((MAX_REQS,), 6, dtype=torch.int32), i32(3, 3, 3, 3, 3, 3)
        before = after - (accepted - 1) - scheduled + drafts
        args = [accepted, columns, None if precomputed else scheduled, after if precomputed else before]
        args += [None if precomputed else drafts, *described, filled(MAX_REQS)]
        args += [i32(*slots) if slots else None, len(slots) if slots else 4]
        constants = {"block_size": BLOCK_SIZE, "COPY_BLOCK_SIZE": 16, "CONV_STATE_DIM_FIRST": channels_first}
        constants |= {"HAS_IDX_MAPPING": slots is not None, "PRECOMPUTED_NEW_COMPUTED": precomputed}
        return make_case(args, constants | {"TEMPORAL_TILES": 2}, memory, hidden)

    rows = len(slots) if slots else 4
    compare("postprocess_mamba_fused_kernel", (rows + 1, 3, 2), build, writes=slots != (1, 4))


@pytest.mark.parametrize("column", [-1, COLUMNS])
def test_column_outside_the_table_is_refused(addresses, column):
    from vllm.v1.worker.cpu.kernels.state_blocks import StateCopier

    (tables, columns, *fields), memory, _ = states(np.random.default_rng(0), addresses, False)
    before = [m.clone() for m in memory]
    with pytest.raises(IndexError, match=rf"\[2, {column}\] asked for, but rows have {COLUMNS} columns"):
        StateCopier(tables, columns, tuple(fields), False).copy(2, 0, column, 0)
    assert all(map(torch.equal, memory, before))


def test_stage_without_recurrent_layers(filled):
    """No state, no program: the counts stay, as with the kernel's empty grid."""
    from vllm.v1.worker.cpu.kernels.mamba_align import postprocess_mamba

    out, none = filled(MAX_REQS), torch.zeros(0, dtype=torch.int64)
    postprocess_mamba(
        i32(1), i32(1), None, i32(8), None, none, COLUMNS, *[none] * 8, out, i32(0), 1,
        block_size=BLOCK_SIZE, COPY_BLOCK_SIZE=16, CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=True,
        PRECOMPUTED_NEW_COMPUTED=True,
    )  # fmt: skip
    assert (out < 0).all()
