# SPDX-License-Identifier: Apache-2.0
"""Which groups a query reads: exact, the same on every run, and in order of position.

Groups are ranked by score, and equal scores by position: the earlier group wins.  This
is a total order, so a row has one right answer, whatever else is in the batch and
however its prompt was cut.

``score.py`` leaves two things in the work space for every row: the ``columns`` scores
as integers that sort as they do, and the top, the largest, of each run of 8.  A group among the
best ``budget`` lies in one of the best ``budget`` runs, ranked by their largest score
and then by position: were its run not among them, each of those runs would hold a group
that ranks higher.  So one program selects twice with one routine (``best.py``), first
runs among ``columns / 8``, then groups among the ``budget * 8`` in them, both from
registers: 48 KiB are read of a row of 256 KiB.
"""

import torch

from vllm.triton_utils import tl, triton

from ..qsa_workspace import indexer_workspace
from .best import bound, count_from, keep_best, least
from .score import BLOCK_N, RUN, rows_at_once, score_groups
from .unpaged import LEAST_ROWS, copy_words, pays, unpaged

# Integers that one program holds: 64 in each of 512 threads, of which ptxas spills 18 on some cards.
_MOST_IN_REGISTERS = 32768
# Integers that a thread holds as long as that takes no more than 16 warps.
_IN_A_THREAD = 64
# Columns of the narrowest kernel: what is short is not worth one of its own.
_FEWEST_COLUMNS = 2048


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
    HELD: tl.constexpr,
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
    place = tl.arange(0, HELD)
    four = tl.arange(0, 4)[None, :]
    run = place
    low = 0
    high = 0
    ranked = (RUNS > HELD) & (runs > BUDGET)
    if ranked:
        first = tl.arange(0, RUNS // RUN) * RUN
        number = first[:, None] + four
        at = run_tops_ptr + row * stride_tops + number
        left = tl.load(at, mask=number < runs, other=-1)
        right = tl.load(at + 4, mask=number + 4 < runs, other=-1)
        high = bound(left, right)
        # The row's own output holds the chosen runs for a moment.
        low = keep_best(left, right, least(left, right), runs, high, first, out_ptr, BUDGET)
        tl.debug_barrier()
        run = tl.load(out_ptr + place, mask=place < BUDGET, other=0)
        runs = BUDGET
    # Whole runs; behind the row's last group the scores are -1.
    at = keys_ptr + row * stride_keys + run[:, None] * RUN + four
    there = (place < runs)[:, None]
    left = tl.load(at, mask=there, other=-1)
    right = tl.load(at + 4, mask=there, other=-1)
    # Every thread has read the runs before any overwrites them.
    tl.debug_barrier()
    if not ranked:
        low = least(left, right)
        high = bound(left, right)
    keep_best(left, right, low, count_from(left, right, low), high, run * RUN, out_ptr, BUDGET)


def _shape(columns: int, budget: int) -> dict[str, int]:
    """Constants and warps of the kernel for rows of so many columns: one for each power of two.

    Raises ValueError where a program would have to hold more integers than there is room for.
    """
    runs = triton.next_power_of_2(triton.cdiv(max(columns, _FEWEST_COLUMNS), RUN))
    held = min(runs, triton.next_power_of_2(budget))
    integers = max(runs if runs > held else 0, held * RUN)
    if integers > _MOST_IN_REGISTERS:
        raise ValueError(
            f"a budget of {budget} groups of {columns} needs {integers} integers in registers, there is room for "
            f"{_MOST_IN_REGISTERS}: lower --max-model-len or the checkpoint's indexer_budget"
        )
    return {
        "RUNS": runs,
        "HELD": held,
        "num_warps": min(16, max(1, integers // (32 * _IN_A_THREAD))),
    }


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
    """Score and select, as many rows at once as the work space holds beside a copy of a prompt's keys."""
    rows, budget = block_indices.shape
    all_columns = page_table.shape[1] * k_cache.shape[1]
    # What does not fit is refused by the first step, not by the first prompt that is long enough.
    _shape(all_columns, budget)
    columns = min(columns, all_columns)
    shape = _shape(columns, budget)
    # Whole tiles, and strides that are multiples of 16 at any length: no second kernel for others.
    whole = max(BLOCK_N, 16 * RUN)
    columns = triton.cdiv(columns, whole) * whole
    per_row = columns + columns // RUN
    space = indexer_workspace(q.device, 4 * per_row)
    requests, dim = page_table.shape[0], k_cache.shape[3]
    if query_start_loc is not None and pays(rows, requests, columns, dim, space.numel()):
        k_cache = unpaged(k_cache, page_table, query_start_loc, visible, columns, budget, space)
        space = space[copy_words(requests, columns, dim) :]
    step = rows_at_once(rows, space.numel() // per_row, query_len)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        keys = space[: count * columns].view(count, columns)
        tops = space[count * columns : count * per_row].view(count, columns // RUN)
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
            RUN=RUN,
            BUDGET=budget,
            **shape,
        )


def qsa_select_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, visible_blocks: torch.Tensor,
    token_topk: int, compress_ratio: int, decode_query_len: int, block_indices: torch.Tensor
) -> None:  # fmt: skip
    """Select for requests that bring ``decode_query_len`` rows each, in order.

    Args:
        q: ``[requests * decode_query_len, heads, width]``, rows lying together; bf16 or
            e4m3, of which the width is a multiple of 4, and 32 or more.
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
    columns = page_table.shape[1] * k_cache.shape[1]
    lengths = [columns]
    while lengths[-1] > _FEWEST_COLUMNS:
        lengths.append(triton.next_power_of_2(lengths[-1]) // 2)
    for groups in lengths:
        tokens = groups * compress_ratio
        qsa_select_paged_prefill(q, k_cache, pages, starts, visible, token_topk, compress_ratio, query_len, out, tokens)
    # Enough rows for their keys to be copied first.
    q, visible = q.new_zeros(LEAST_ROWS, *q.shape[1:]), visible.new_zeros(LEAST_ROWS)
    starts, out = starts.new_tensor([0, LEAST_ROWS]), out.new_empty(LEAST_ROWS, out.shape[1])
    qsa_select_paged_prefill(q, k_cache, pages, starts, visible, token_topk, compress_ratio, LEAST_ROWS, out, 1)
    prompts = [f"prefill of {n} groups" for n in lengths] + [f"prefill of {LEAST_ROWS} rows"]
    return [f"decode of {length}" for length in range(1, query_len + 1)] + prompts


__all__ = ["qsa_select_paged_decode", "qsa_select_paged_prefill", "warm_up"]
