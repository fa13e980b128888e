# SPDX-License-Identifier: Apache-2.0
"""Decode, second half: the states of a row's splits, joined from left to right, and the gated result.

With one request the GPU does nothing else meanwhile and a program is one warp, so that its
latency is the kernel's: loads do not wait for each other, and what all lanes would compute alike,
each split's share, is computed once, a split to a lane.
"""

from collections.abc import Iterator

import torch

from vllm.triton_utils import tl, triton

from ..qsa_workspace import indexer_workspace
from .places import extent
from .softmax import NOTHING, gated, power_of_two, share_of

# Dimensions of a program, two to a lane: a quarter of a head, so that 33 splits lie in registers while they arrive.
PART = 64


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _dims_of(places, FORM: tl.constexpr, DIM: tl.constexpr):
    """Which dimensions planes (`operands.plane_dims`) hold at ``places``, planes one after the other."""
    if FORM == "bf16":
        return places
    else:
        return places % (DIM // 2) * 2 + places // (DIM // 2)


@triton.jit(do_not_specialize=["num_requests"])
def join_kernel(
    accumulators, maxima, normalisers, selected, token_to_req, gate, gate_row, gate_head, out, out_row, out_head,
    value_scale, num_requests, FORM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PART: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program, ``PART`` numbers of one row and query head; ``LANES`` is a power of two, ``SPLITS`` at least.

    The same bits as ``softmax.join`` of one split after the other.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers = tl.program_id(2) * PART + tl.arange(0, PART)
    dims = _dims_of(numbers, FORM, DIM)
    # Whether a split is there or not, so that no load waits for the count. Nobody wrote those that are not.
    states = accumulators + (row * (SPLITS * HEADS) + head) * DIM + numbers
    parts = (tl.load(states),)
    for split in tl.static_range(1, SPLITS):
        parts = parts + (tl.load(states + split * (HEADS * DIM)),)
    gates = tl.load(gate + row * gate_row + head * gate_head + dims)
    # One warp has none to wait for. But past this the compiler moves no load, and it moved all of these behind
    # what waits for the count, to spare registers.
    tl.debug_barrier()
    splits = tl.arange(0, LANES)
    at = (row * HEADS + head) * SPLITS + splits
    maximum = tl.load(maxima + at, mask=splits < SPLITS, other=NOTHING)
    normaliser = tl.load(normalisers + at, mask=splits < SPLITS, other=0.0)
    _, count = extent(selected, token_to_req, num_requests, row, WIDTH)

    there = splits * SPLIT < count
    maximum = tl.where(there, maximum, NOTHING)
    raised = tl.maximum(tl.associative_scan(maximum, 0, _larger), NOTHING)
    before = tl.where(splits == 0, NOTHING, tl.gather(raised, tl.maximum(splits - 1, 0), 0))
    fades, weights = power_of_two(before - raised), power_of_two(maximum - raised)
    weighed = tl.where(there, normaliser, 0.0) * weights
    sums, total = tl.zeros((PART,), tl.float32), tl.zeros((1,), tl.float32)
    for split in tl.static_range(SPLITS):
        this = tl.full((1,), split, tl.int32)
        fade = tl.gather(fades, this, 0)
        more = tl.where(split * SPLIT < count, parts[split], 0.0) * tl.gather(weights, this, 0)
        sums = tl.math.fma(sums, tl.broadcast_to(fade, (PART,)), more)
        total = tl.math.fma(total, fade, tl.gather(weighed, this, 0))
    done = gated(sums * share_of(total, value_scale), gates, out.dtype.element_ty)
    tl.store(out + row * out_row + head * out_head + dims, done)


def split_states(
    rows: int, heads: int, splits: int, dim: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Where splits leave their states, for as many rows at a time as the workspace holds.

    That is the indexer's, as in ``places.placed``: 128 rows or more by default, which fill any card, in memory that the
    profile has counted.  Yields rows, accumulators ``[some rows, splits, heads, dim]`` and maxima and normalisers
    ``[some rows, heads, splits]``, not initialised; they last until the next are asked for.
    """
    # Four numbers are what a pointer wants to be a multiple of; Triton compiles for those that are not apart.
    each = -(-heads * splits // 4) * 4
    per_row = each * (dim + 2)
    space = indexer_workspace(device, 4 * per_row).view(torch.float32)
    step = space.numel() // per_row
    step = step // 4 * 4 or step
    for first in range(0, rows, step):
        count = min(step, rows - first)
        accumulators, maxima, normalisers = space[: count * per_row].split((count * each * dim, *[count * each] * 2))
        number = count * heads * splits
        yield (
            slice(first, first + count),
            accumulators[: number * dim].view(count, splits, heads, dim),
            maxima[:number].view(count, heads, splits),
            normalisers[:number].view(count, heads, splits),
        )
