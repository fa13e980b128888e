# SPDX-License-Identifier: Apache-2.0
"""Which groups a query reads: exact, the same on every run, and in order of position.

Groups are ranked by score, and equal scores by position: the earlier group wins.  This
is a total order, so a row has one right answer, whatever else is in the batch and
however its prompt was cut.

``score.py`` leaves two things in the work space for every row: the ``columns`` scores
as integers that sort as they do, and the top, the largest, of each run of 16.  A group among the
best ``budget`` lies in one of the best ``budget`` runs, ranked by their largest score
and then by position: were its run not among them, each of those runs would hold a group
that ranks higher.  So one program selects twice with one routine, first runs among
``columns / 16``, then groups among the ``budget * 16`` in them, both from registers:
48 KiB are read of a row of 256 KiB.

The routine finds the ``budget``-th largest integer bit by bit, 31 counts, and numbers
what lies above and, as far as there is room, at it by a running sum in order of
position.
"""

import torch

from vllm.triton_utils import tl, triton

from ..qsa_workspace import indexer_workspace
from .score import BLOCK_N, run_length, score_groups

# Integers that one program holds: 64 in each of 512 threads. At 32 in each, which takes
# a budget of 2048 groups or a context of a million tokens, ptxas spills 88 bytes.
_MOST_IN_REGISTERS = 32768


@triton.jit
def _keep_best(key, position, out_ptr, KEEP: tl.constexpr):
    """Write the positions of the ``KEEP`` largest keys, ascending, to ``out_ptr``.

    ``key`` is int32, -1 where there is nothing; at least ``KEEP`` are not.  ``position``
    ascends.  Of equal keys the first win.
    """
    threshold = 0
    for step in range(31):
        candidate = threshold + (1 << (30 - step))
        count = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(count >= KEEP, candidate, threshold)
    above = key > threshold
    level = key == threshold
    # Both running counts in one sum: fewer than 2**16 keys, fewer than 2**15 above.
    counts = tl.cumsum(above.to(tl.int32) * 65536 + level.to(tl.int32), axis=0)
    above_count = counts >> 16
    level_count = counts & 65535
    room = KEEP - tl.sum(above.to(tl.int32), axis=0)
    kept = above | (level & (level_count <= room))
    tl.store(out_ptr + above_count + tl.minimum(level_count, room) - 1, position, mask=kept)


@triton.jit(do_not_specialize_on_alignment=["visible_ptr"])
def _select_kernel(
    keys_ptr,
    run_tops_ptr,
    visible_ptr,
    out_ptr,
    stride_keys,
    stride_tops,
    stride_out,
    RUN: tl.constexpr,
    BUDGET: tl.constexpr,
    RUNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_ptr + row)
    out_ptr += row * stride_out
    PADDED: tl.constexpr = triton.next_power_of_2(BUDGET)
    if visible <= BUDGET:
        # Nothing to rank: everything fits.
        all_of_them = tl.arange(0, PADDED)
        tl.store(out_ptr + all_of_them, tl.where(all_of_them < visible, all_of_them, -1), mask=all_of_them < BUDGET)
        return
    runs = tl.cdiv(visible, RUN)
    ranked = runs > BUDGET
    if ranked:
        run_number = tl.arange(0, RUNS)
        tops = tl.load(run_tops_ptr + row * stride_tops + run_number, mask=run_number < runs, other=-1)
        # The row's own output holds the chosen runs for a moment.
        _keep_best(tops, run_number, out_ptr, BUDGET)
        tl.debug_barrier()
    member = tl.arange(0, PADDED * RUN)
    place = member // RUN
    run = tl.load(out_ptr + place, mask=ranked & (place < BUDGET), other=0)
    position = tl.where(ranked, run, place) * RUN + member % RUN
    # Whole runs, so that they are read 16 bytes at a time; what lies behind the row's last group is dropped.
    key = tl.load(keys_ptr + row * stride_keys + position, mask=place < tl.minimum(runs, BUDGET), other=-1)
    key = tl.where(position < visible, key, -1)
    # Every thread has read the runs before any overwrites them.
    tl.debug_barrier()
    _keep_best(key, position, out_ptr, BUDGET)


def _warps(integers: int) -> int:
    """Warps of a program that holds this many, 16 a thread as long as that is possible.

    For the published model, 8,192 integers, that is 16 warps of 83 registers. Half as
    many warps take 162: either way one program fills an SM, and more warps wait less.
    """
    return max(4, min(16, integers // 512))


def _select_chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    query_len: int,
    max_query_len: int,
    visible: torch.Tensor,
    columns: int,
    block_indices: torch.Tensor,
) -> None:
    """Score and select, as many rows at once as the work space holds."""
    rows, budget = block_indices.shape
    all_columns = page_table.shape[1] * k_cache.shape[1]
    run = run_length(budget)
    # Not of this step's columns: a kernel for every length would be compiled as prompts grow.
    runs = triton.next_power_of_2(triton.cdiv(all_columns, run))
    held = max(runs, triton.next_power_of_2(budget) * run)
    if held > _MOST_IN_REGISTERS:
        raise ValueError(
            f"a budget of {budget} groups of {all_columns} needs {held} integers in registers, there is room for "
            f"{_MOST_IN_REGISTERS}: lower --max-model-len or the checkpoint's indexer_budget"
        )
    # Whole tiles, and strides that are multiples of 16 at any length: no second kernel for others.
    whole = max(BLOCK_N, 16 * run)
    columns = triton.cdiv(min(columns, all_columns), whole) * whole
    per_row = columns + columns // run
    space = indexer_workspace(q.device, 4 * per_row)
    step = min(rows, space.numel() // per_row)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        keys = space[: count * columns].view(count, columns)
        tops = space[count * columns : count * per_row].view(count, columns // run)
        score_groups(
            q, k_cache, page_table, query_start_loc, query_len, max_query_len, visible, budget, first, keys, tops
        )
        chosen = block_indices[first : first + count]
        _select_kernel[(count,)](
            keys,
            tops,
            visible[first : first + count],
            chosen,
            keys.stride(0),
            tops.stride(0),
            chosen.stride(0),
            RUN=run,
            BUDGET=budget,
            RUNS=runs,
            num_warps=_warps(held),
        )


def qsa_select_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, visible_blocks: torch.Tensor,
    token_topk: int, compress_ratio: int, decode_query_len: int, block_indices: torch.Tensor
) -> None:  # fmt: skip
    """Select for requests that bring ``decode_query_len`` rows each, in order.

    Args:
        q: ``[requests * decode_query_len, heads, width]``, rows lying together.
        k_cache: ``[pages, page_size, 1, width]`` compressed keys of ``q``'s dtype.
        page_table: ``[requests, pages per request]``.
        visible_blocks: ``[rows]`` int32, complete groups before each row.
        token_topk: tokens that a row may select.
        compress_ratio: tokens in a group.
        decode_query_len: rows of each request.
        block_indices: ``[rows, token_topk / compress_ratio]`` int32, overwritten:
            ascending positions of groups, then -1.

    Raises ValueError where a row's groups would not fit in registers.

    """
    assert block_indices.shape == (q.shape[0], token_topk // compress_ratio)
    assert q.shape[0] == page_table.shape[0] * decode_query_len
    if q.shape[0]:
        columns = page_table.shape[1] * k_cache.shape[1]
        _select_chunks(
            q, k_cache, page_table, None, decode_query_len, decode_query_len, visible_blocks, columns, block_indices
        )


def qsa_select_paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, query_start_loc: torch.Tensor,
    visible_blocks: torch.Tensor, token_topk: int, compress_ratio: int, max_query_len: int,
    block_indices: torch.Tensor, max_seq_len: int
) -> None:  # fmt: skip
    """Select for requests of any length.

    As ``qsa_select_paged_decode``, with ``query_start_loc`` ``[requests + 1]`` giving
    each request's rows (its first value is the batch row of ``q[0]``).
    ``max_query_len`` bounds a request's rows and ``max_seq_len`` its tokens.
    """
    assert block_indices.shape == (q.shape[0], token_topk // compress_ratio)
    if q.shape[0]:
        columns = triton.cdiv(max_seq_len, compress_ratio)
        _select_chunks(
            q, k_cache, page_table, query_start_loc, 0, max_query_len, visible_blocks, columns, block_indices
        )


def warm_up(
    k_cache: torch.Tensor, page_table: torch.Tensor, heads: int, token_topk: int, compress_ratio: int, query_len: int
) -> list[str]:
    """Compile what decode steps of up to ``query_len`` rows and prompts will launch.

    Rows see no group, so that nothing is read.  Returns what was compiled, for the log.
    """
    pages = page_table[:1]
    for length in range(1, query_len + 1):
        q = k_cache.new_zeros(length, heads, k_cache.shape[3])
        visible = torch.zeros(length, dtype=torch.int32, device=q.device)
        out = torch.empty(length, token_topk // compress_ratio, dtype=torch.int32, device=q.device)
        qsa_select_paged_decode(q, k_cache, pages, visible, token_topk, compress_ratio, length, out)
    starts = torch.tensor([0, query_len], dtype=torch.int32, device=q.device)
    qsa_select_paged_prefill(q, k_cache, pages, starts, visible, token_topk, compress_ratio, query_len, out, 1)
    return [f"decode of {length}" for length in range(1, query_len + 1)] + ["prefill"]


__all__ = ["qsa_select_paged_decode", "qsa_select_paged_prefill", "warm_up"]
