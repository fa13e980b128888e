"""Block tables: groups of unequal width, padding rows, null blocks, windows, ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

WIDTHS = [5, 9, 1100]  # the last one takes two of the kernel's chunks of 1024
BLOCK_SIZES = [16, 12, 4]
SLOTS = [4, 0, 2]  # rows of the batch; slots 1, 3 and 5 are other requests
MAX_REQS = 6


def tables(rng: np.random.Generator, addresses) -> SimpleNamespace:
    rows = [torch.from_numpy(rng.integers(1, 1000, (MAX_REQS, w), dtype=np.int32)) for w in WIDTHS]
    return SimpleNamespace(
        rows=rows,
        addresses=addresses(rows),
        widths=torch.tensor(WIDTHS),
        sizes=torch.tensor(BLOCK_SIZES, dtype=torch.int32),
    )


@pytest.mark.parametrize("rows", [3, 6])
@pytest.mark.parametrize("window", [False, True])
def test_gather(compare, make_case, addresses, filled, rows, window):
    def build(rng):
        source = tables(rng, addresses)
        target = [filled(MAX_REQS, w) for w in WIDTHS]
        where = addresses(target)
        counts = np.stack([rng.integers(0, w + 1, MAX_REQS) for w in WIDTHS]).astype(np.int32)
        counts[1, 0] = 0  # a request without blocks in one group
        counts[2, 4] = 1100
        counts[0, 2] = 5
        # In group 0, slot 2 sees from token 32 on: exactly two blocks are behind it.
        computed = torch.tensor([30, 9, 52, 9, 3000, 9], dtype=torch.int32)
        reach = torch.tensor([20, 0, 11], dtype=torch.int32)
        args = [torch.tensor(SLOTS, dtype=torch.int32), source.addresses, where, source.widths]
        args += [torch.from_numpy(counts), MAX_REQS, len(SLOTS), computed, reach, source.sizes]
        constants = {"MASK_SLIDING_WINDOW": window, "BLOCK_SIZE": 1024}
        return make_case(args, constants, source.rows + target, [source.addresses, where])

    done = compare("_gather_block_tables_kernel", (len(WIDTHS), rows), build)
    for table in done.watched[len(WIDTHS) :]:
        assert (table[len(SLOTS) : rows] == 0).all()
        assert (table[rows:] < 0).all(), "rows past the grid are another batch's"


@pytest.mark.parametrize("ranks,interleave", [(1, 1), (2, 1), (4, 3)])
@pytest.mark.parametrize("slots", [SLOTS, [4, -1, 2], [-1, -1, -1]])
def test_slot_mappings(compare, make_case, addresses, filled, ranks, interleave, slots):
    starts, lengths = [0, 7, 8, 17], [7, 1, 9]
    first = [5, 13, 30]

    def build(rng):
        source = tables(rng, addresses)
        positions = np.concatenate([np.arange(f, f + n) for f, n in zip(first, lengths)])
        positions = torch.cat([torch.from_numpy(positions), torch.full((4,), -1)])
        slot_mappings = filled(len(WIDTHS), 1050, dtype=torch.int64)
        args = [1050, torch.tensor(slots, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)]
        args += [positions, source.addresses, source.widths, source.sizes]
        args += [torch.tensor([True, False, True]), torch.tensor([True, True, False])]
        args += [slot_mappings, slot_mappings.stride(0), ranks - 1]
        constants = {"CP_SIZE": ranks, "CP_INTERLEAVE": interleave, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 1024}
        return make_case(args, constants, source.rows, [source.addresses])

    done = compare("_compute_slot_mappings_kernel", (len(WIDTHS), len(slots) + 1), build)
    slot_mappings = done.args[9]
    assert (slot_mappings[:, 17:] == -1).all() and (slot_mappings[1] == -1).all()


def test_slot_past_the_table_is_refused(addresses, filled):
    """The kernel would read the next request's row."""
    from vllm.v1.worker.cpu.kernels.block_tables import compute_slot_mappings

    source = tables(np.random.default_rng(0), addresses)
    one = torch.tensor([True] * 3)
    bounds, slot = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    position = torch.tensor([16 * 5])
    with pytest.raises(IndexError):
        compute_slot_mappings(
            8, slot, bounds, position, source.addresses, source.widths, source.sizes, one, one,
            filled(3, 8, dtype=torch.int64), 8, 0, CP_SIZE=1, CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(MAX_REQS, 1100), (MAX_REQS,)])
def test_write_one_tensor(compare, make_case, filled, kind, shape):
    lengths = [3, 1030, 1] if len(shape) == 2 else [1, 1, 1]

    def build(rng):
        output = filled(*shape, dtype=kind)
        starts = [0, 70, 1099] if len(shape) == 2 else [0, 0, 0]
        contents = torch.from_numpy(rng.integers(0, 99, sum(lengths))).to(kind)
        ends = np.cumsum(lengths).astype(np.int32)
        args = [output, output.stride(0), torch.tensor([5, 0, 3], dtype=torch.int32)]
        args += [torch.tensor(starts, dtype=torch.int32), contents, torch.from_numpy(ends), None]
        return make_case(args, {"BLOCK_SIZE": 1024, "MULTI_GROUP": False})

    compare("_apply_write_kernel", (3, 2), build)


def test_write_several_tables(compare, make_case, addresses):
    def build(rng):
        target = tables(rng, addresses)
        lengths = [5, 1, 1030, 2]
        args = [target.addresses, target.widths, torch.tensor([5, 0, 3, 5], dtype=torch.int32)]
        args += [torch.tensor([0, 8, 70, 3], dtype=torch.int32)]
        args += [torch.from_numpy(rng.integers(2000, 3000, sum(lengths), dtype=np.int32))]
        args += [torch.from_numpy(np.cumsum(lengths).astype(np.int32)), torch.tensor([0, 1, 2, 0], dtype=torch.int32)]
        return make_case(args, {"BLOCK_SIZE": 1024, "MULTI_GROUP": True}, target.rows, [target.addresses])

    compare("_apply_write_kernel", (4, 2), build)


@pytest.mark.parametrize("start,values", [(4, 2), (5, 1), (9, 1)])
def test_write_past_the_row_is_refused(filled, start, values):
    from vllm.v1.worker.cpu.kernels.block_tables import apply_write

    output = filled(3, 5)
    where = [torch.tensor([v], dtype=torch.int32) for v in (1, start, values)]
    contents = torch.ones(values, dtype=torch.int32)
    with pytest.raises(IndexError, match=rf"{values} values .* column {start} of row 1, which has 5 columns"):
        apply_write(output, 5, *where[:2], contents, where[2], None, BLOCK_SIZE=1024, MULTI_GROUP=False)
    assert (output < 0).all()


def test_zero_kv_blocks(compare, make_case, addresses, filled):
    def build(rng):
        # Two layers with pages shorter than the stride, the second one's 1.5 chunks long.
        pools = [filled(7, 20), filled(7, 1600)]
        where = addresses(pools)
        args = [where, torch.tensor([20, 1600]), torch.tensor([13, 1536]), torch.tensor([6, 0, 3])]
        return make_case(args, {"BLOCK_SIZE": 1024}, pools, [where])

    done = compare("_zero_kv_blocks_kernel", (3, 2, 2), build)
    assert (done.watched[0][0, :13] == 0).all() and (done.watched[0][0, 13:] < 0).all()
