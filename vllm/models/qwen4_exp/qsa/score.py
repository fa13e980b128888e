# SPDX-License-Identifier: Apache-2.0
"""Scores of compressed keys, as integers that sort as the scores do.

The score of a group is ``sum over index heads of relu(<q_head, key>)``.  It is never
negative, so its bits, read as an integer, are in the same order.  A NaN becomes an
integer above infinity's: a damaged group is always selected, and its request notices, instead of
dropping out of sight as the hardware's maximum of NaN and 0 would have it.

A number here depends on one query and one key.  Tiles are fixed, products run over the
whole width in one order, and decode and prefill share the kernel and its matrix
instruction (64 keys by a multiple of 16 query heads, 16 of the width at a time), so that
a row scores the same in either.

Keys and queries are bf16, or both e4m3 (``index_keys.py``).  The latter are read four to a
word and become fp16 exactly, even and odd dimensions apart, and each times 144: that
factor, the same for all scores, stays in them.
"""

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.platform_utils import num_compute_units

from .e4m3 import infinite_to_nan
from .index_keys import halves, words

BLOCK_N = 64
# Columns that share a top. For n columns and a budget of b the selection holds n / RUN tops, then b * RUN columns: of
# 65,536 and 512, 8 and 16 make that the least, and of fewer columns 8 do.
RUN = 8

# Rows of a prompt in a tile: work on a key tile is shared by so many.  Of 64, half as many programs fit on a GPU and wait
# for each other's loads less well: 1,208 us for 2,048 rows at 250,000 tokens on an H200, where 32 take 1,030.
_PROMPT_ROWS = 32
# A program of a decode takes one key tile, more where there would be more programs than this.  Most find nothing to do
# where block tables have room for more than the context.
_DECODE_PROGRAMS = 16384
# One of a prompt first reads 32 KiB of q, so it takes about as many as this: of 8 instead of 16, 2,048 rows at 250,000
# tokens took 1.08 times as long on an H200.
_PROMPT_TILES = 32
# One more than a tile that is multiplied and one on its way: with 2 the next tile is asked for after this one's scores are
# stored, and nothing is left to hide its way behind.
_PROMPT_STAGES = 3
# Keys of a decode's tile. With one tile a program there is nothing to load ahead.
_DECODE_KEYS = BLOCK_N
_DECODE_STAGES = 1

_WITHOUT_SIGN = tl.constexpr(0x7FFFFFFF)
# One above the largest that is written, the end of a range, has to be an integer as well.
_MOST = tl.constexpr(0x7FFFFFFE)


@triton.jit
def _load_queries(base, there, DIM: tl.constexpr):
    """The queries at ``base``, ``[width, lanes]``; zeros where not ``there``.  Two halves of the width from words."""
    if base.dtype.element_ty == tl.int32:
        word = tl.arange(0, triton.next_power_of_2(DIM // 4))
        at = base[:, None] + word[None, :]
        even, odd = halves(tl.load(at, mask=there[:, None] & (word < DIM // 4)[None, :], other=0))
        return tl.trans(even), tl.trans(odd)
    else:
        dim = tl.arange(0, max(16, triton.next_power_of_2(DIM)))
        return (tl.load(base[None, :] + dim[:, None], mask=there[None, :] & (dim < DIM)[:, None], other=0.0),)


@triton.jit
def _products(base, query, DIM: tl.constexpr, EVICTION: tl.constexpr):
    """Of the keys at ``base`` with ``query``: ``[keys, lanes]``, NaN where a number is none."""
    if base.dtype.element_ty == tl.int32:
        word = tl.arange(0, triton.next_power_of_2(DIM // 4))
        codes = tl.load(
            base[:, None] + word[None, :],
            mask=(word < DIM // 4)[None, :],
            other=0,
            eviction_policy=EVICTION,
        )
        even, odd = halves(codes)
        product = tl.dot(even, query[0], out_dtype=tl.float32)
        return infinite_to_nan(tl.dot(odd, query[1], acc=product))
    else:
        dim = tl.arange(0, max(16, triton.next_power_of_2(DIM)))
        # As bits: keys then reach a warp group's instruction through registers, as decoded ones do.  It would read loaded
        # numbers from shared memory itself, from one more buffer, and wait for the last tile's stores before each tile.
        bits = tl.load(
            base.to(tl.pointer_type(tl.int16))[:, None] + dim[None, :],
            mask=(dim < DIM)[None, :],
            other=0,
            eviction_policy=EVICTION,
        )
        key = bits.to(base.dtype.element_ty, bitcast=True)
        return tl.dot(key, query[0], out_dtype=tl.float32)


@triton.jit
def _pages(table, start, member, last, PAGE: tl.constexpr):
    """Pages of the keys ``start + member``, ``last`` at most: the tile's first and second, or one for each key."""
    if PAGE >= member.shape[0]:
        end = last // PAGE
        first = tl.minimum(start // PAGE, end)
        return tl.load(table + first), tl.load(table + tl.minimum(first + 1, end))
    else:
        return (tl.load(table + tl.minimum(start + member, last) // PAGE),)


@triton.jit
def _key_offsets(pages, start, member, last, stride_page, stride_token, PAGE: tl.constexpr):
    """Where the keys of ``_pages`` begin in the cache."""
    if PAGE >= member.shape[0]:
        token = start % PAGE
        first = pages[0].to(tl.int64) * stride_page + token * stride_token
        step = (pages[1] - pages[0]).to(tl.int64) * stride_page - PAGE * stride_token
        # A product and not tl.where, of which the compiler does not see that 16 bytes at a time are aligned.
        return first + member * stride_token + (member >= PAGE - token).to(tl.int64) * step
    else:
        token = tl.minimum(start + member, last) % PAGE
        return pages[0].to(tl.int64) * stride_page + token * stride_token


@triton.jit
def _dealt_rows(x, PARTS: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """A number for each row of a tile, in the order of axes that scores are stored in."""
    dealt = tl.permute(tl.reshape(x, (PARTS, PAIRS, WARPS, 4)), (0, 2, 1, 3))
    return tl.reshape(dealt, (1, PARTS, 1, WARPS, 4 * PAIRS, 1))


# Prompts follow the decodes of a batch, so these pointers may start anywhere: each alignment
# would be compiled when it first comes, while requests wait.
@triton.jit(
    do_not_specialize=["first_row", "num_rows", "page_table_width", "tiles"],
    do_not_specialize_on_alignment=["page_table_ptr", "query_start_ptr", "visible_ptr"],
)
def _score_kernel(
    q_ptr,
    k_cache_ptr,
    page_table_ptr,
    query_start_ptr,
    visible_ptr,
    keys_ptr,
    tops_ptr,
    stride_q_row,
    stride_q_head,
    stride_cache_page,
    stride_cache_token,
    stride_table,
    stride_keys,
    stride_tops,
    first_row,
    num_rows,
    page_table_width,
    tiles,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BUDGET: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
    WARPS_N: tl.constexpr,
    WARPS_R: tl.constexpr,
):
    # Rows of the work space are batch rows from first_row on.
    HEADS_P: tl.constexpr = max(2, triton.next_power_of_2(HEADS))
    request = tl.program_id(0)
    if QUERY_LEN > 0:
        begin = request * QUERY_LEN
        end = begin + QUERY_LEN
    else:
        base = tl.load(query_start_ptr)
        begin = tl.load(query_start_ptr + request) - base
        end = tl.load(query_start_ptr + request + 1) - base
    begin = tl.maximum(begin, first_row) + tl.program_id(1) * TILE_R
    end = tl.minimum(end, first_row + num_rows)
    if begin >= end:
        return
    row = begin + tl.arange(0, TILE_R)
    visible = tl.load(visible_ptr + row, mask=row < end, other=0)
    most = tl.max(visible, axis=0)
    fewest = tl.min(visible, axis=0)
    tile = tl.program_id(2) * tiles
    # Rows that see no more than the budget are not ranked.
    if (most <= BUDGET) | (tile * BLOCK_N >= most):
        return
    last_tile = tl.minimum(tile + tiles, tl.cdiv(most, BLOCK_N))

    lane = tl.arange(0, TILE_R * HEADS_P)
    # A thread of the matrix instruction holds two neighbours of each eight lanes: all heads of some of the rows.
    q_row = begin + lane % (2 * TILE_R) // 2
    head = lane // (2 * TILE_R) * 2 + lane % 2
    # And of 16 keys the first or second eight of one place: neighbours here.
    member = tl.arange(0, BLOCK_N)
    member = member // 16 * 16 + member % 8 * 2 + member // 8 % 2
    query = _load_queries(
        q_ptr + q_row.to(tl.int64) * stride_q_row + head * stride_q_head, (q_row < end) & (head < HEADS), DIM
    )
    # Scores are stored by the warps that have them, which then exchange nothing: a warp has KEYS neighbours, four to a
    # thread, for each of ROWS rows, again every WARPS_N-th of those and every WARPS_R-th of these.  A tensor with axes
    # in this order is dealt out alike for its store.
    PAIRS: tl.constexpr = min(2, TILE_R // (4 * WARPS_R))
    ROWS: tl.constexpr = 4 * PAIRS
    PARTS_R: tl.constexpr = TILE_R // (ROWS * WARPS_R)
    SIXTEENS: tl.constexpr = 2 if WARPS_N * PAIRS == 1 else 1
    KEYS: tl.constexpr = 16 * SIXTEENS
    PARTS_N: tl.constexpr = BLOCK_N // (KEYS * WARPS_N)
    row = _dealt_rows(row, PARTS_R, PAIRS, WARPS_R)
    visible = _dealt_rows(visible, PARTS_R, PAIRS, WARPS_R)
    place = tl.reshape(tl.arange(0, BLOCK_N), (PARTS_N, 1, WARPS_N, 1, 1, KEYS))
    run = tl.reshape(tl.arange(0, BLOCK_N // RUN), (PARTS_N, 1, WARPS_N, 1, 1, KEYS // RUN))
    at_row = (row - first_row).to(tl.int64)
    keys_at = keys_ptr + at_row * stride_keys + place
    tops_at = tl.permute(tops_ptr + at_row * stride_tops + run, (2, 3, 0, 1, 4, 5))
    there = row < end
    page_table_ptr += request.to(tl.int64) * stride_table
    # What lies behind the last key that a row sees is masked when scores are stored, so any key may stand for it.
    last = tl.minimum(most, page_table_width * PAGE) - 1
    pages = _pages(page_table_ptr, tile * BLOCK_N, member, last, PAGE)
    for number in tl.range(tile, last_tile, num_stages=STAGES):
        key = k_cache_ptr + _key_offsets(
            pages, number * BLOCK_N, member, last, stride_cache_page, stride_cache_token, PAGE
        )
        # A tile before its keys are asked for: an address that waits for a load holds up the load that needs it.
        pages = _pages(page_table_ptr, (number + 1) * BLOCK_N, member, last, PAGE)
        product = _products(key, query, DIM, EVICTION)
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
        product = tl.sum(tl.reshape(product, (BLOCK_N, HEADS_P // 2, TILE_R, 2)), axis=3)
        score = tl.sum(product, axis=1)
        score = tl.reshape(score, (PARTS_N, WARPS_N, SIXTEENS, 2, 8, PARTS_R, PAIRS, WARPS_R, 4))
        score = tl.permute(score, (0, 5, 1, 7, 6, 8, 2, 4, 3))
        score = tl.reshape(score, (PARTS_N, PARTS_R, WARPS_N, WARPS_R, ROWS, KEYS))
        # The sign bit of a -0 goes, and a NaN's, which is above infinity without.
        ordered = tl.minimum(score.to(tl.int32, bitcast=True) & _WITHOUT_SIGN, _MOST)
        # To the tile's end, so that who reads whole runs need not look where the row ends. Most tiles lie before.
        if (number + 1) * BLOCK_N > fewest:
            ordered = tl.where(number * BLOCK_N + place < visible, ordered, -1)
        tl.store(keys_at + number * BLOCK_N, ordered, mask=there)
        runs = tl.reshape(ordered, (PARTS_N, PARTS_R, WARPS_N, WARPS_R, ROWS, KEYS // RUN, RUN))
        top = tl.permute(tl.max(runs, axis=6), (2, 3, 0, 1, 4, 5))
        tl.store(tops_at + number * (BLOCK_N // RUN), top, mask=tl.permute(there, (2, 3, 0, 1, 4, 5)))


def _prompt_warps() -> int:
    """One warp group multiplies a tile where there are such; two would share it by heads and have to exchange sums.

    Elsewhere eight: a tile of that size leaves room for one program, and four warps wait for each other.
    """
    groups = current_platform.has_device_capability(90) and not current_platform.has_device_capability(120)
    return 4 if groups else 8


def deal(warps: int, number_bytes: int) -> dict[str, int]:
    """How many warps Triton has share the keys of a tile, and how many its rows, by bytes of a number.

    Scores are right whatever this says; where it is wrong, warps exchange them before they are stored.
    """
    # Keys of e4m3 are decoded in registers, by every warp that multiplies them.
    keys = 4 if warps == 4 else 2 if number_bytes == 2 else 1
    return {"WARPS_N": keys, "WARPS_R": warps // keys}


def programs_at_once(warps: int) -> int:
    """Programs of a prompt that a multiprocessor has shared memory and registers for."""
    return 3 if warps == 4 else 1


def _prompt_tiles(row_tiles: int, key_tiles: int, at_once: int) -> int:
    """Key tiles of a program, such that programs are a little fewer than a multiple of those that run ``at_once``.

    Of a few more, most multiprocessors would have nothing to do while those are run.
    """
    rounds = triton.cdiv(row_tiles * key_tiles, at_once * _PROMPT_TILES)
    return triton.cdiv(key_tiles, max(1, rounds * at_once // row_tiles))


def rows_at_once(rows: int, most: int, query_len: int) -> int:
    """Rows to score in a launch, ``most`` at most, so that launches are of one size; of prompts whole tiles, if one fits."""
    tile = 1 if query_len or most < _PROMPT_ROWS else _PROMPT_ROWS
    tiles = triton.cdiv(rows, tile)
    return triton.cdiv(tiles, triton.cdiv(tiles, most // tile)) * tile


def score_groups(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    query_len: int,
    max_query_len: int,
    visible: torch.Tensor,
    budget: int,
    first_row: int,
    keys: torch.Tensor,
    tops: torch.Tensor,
) -> None:
    """Score the visible groups of ``len(keys)`` rows from ``first_row`` on.

    Args:
        q: ``[rows, heads, width]``, bf16 or e4m3.
        k_cache: ``[pages, page_size, 1, width]`` of ``q``'s dtype; of e4m3 the width is a
            multiple of 4, and 32 or more.
        page_table: ``[requests, pages per request]``.
        query_start_loc: ``[requests + 1]``, or None where every request brings
            ``query_len`` rows.
        query_len: rows of each request, 0 where ``query_start_loc`` says.
        max_query_len: the most rows that a request brings.
        visible: ``[rows]`` int32.
        budget: rows that see no more groups than this are skipped.
        first_row: the batch row of ``keys[0]``.
        keys: ``[rows, columns]`` int32, whole tiles of columns; written where a row sees
            the group, and -1 from there to the tile's end.
        tops: ``[rows, columns / RUN]`` int32, the largest of each run of columns, as far
            as those are written.

    """
    count, columns = keys.shape
    dim, number_bytes = q.shape[2], q.element_size()
    q, k_cache = words(q), words(k_cache)
    heads = max(2, triton.next_power_of_2(q.shape[1]))
    # A tile holds a decode request whole, and at least 16 query heads: fewer would not
    # take the matrix instruction.  Four rows, so that a thread has all heads of one.
    tile_rows = max(16 // heads, 4, triton.next_power_of_2(query_len)) if query_len else _PROMPT_ROWS
    tile_keys = _DECODE_KEYS if query_len else BLOCK_N
    key_tiles = triton.cdiv(columns, tile_keys)
    row_tiles = triton.cdiv(min(count, max_query_len), tile_rows)
    all_row_tiles = page_table.shape[0] * row_tiles
    if query_len:
        tiles = triton.cdiv(all_row_tiles * key_tiles, _DECODE_PROGRAMS)
    else:
        at_once = num_compute_units() * programs_at_once(_prompt_warps())
        tiles = _prompt_tiles(all_row_tiles, key_tiles, at_once)
    warps = 4 if query_len else _prompt_warps()
    grid = (page_table.shape[0], row_tiles, triton.cdiv(key_tiles, tiles))
    _score_kernel[grid](
        q,
        k_cache,
        page_table,
        page_table if query_start_loc is None else query_start_loc,
        visible,
        keys,
        tops,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        page_table.stride(0),
        keys.stride(0),
        tops.stride(0),
        first_row,
        count,
        page_table.shape[1],
        tiles,
        PAGE=k_cache.shape[1],
        HEADS=q.shape[1],
        DIM=dim,
        BUDGET=budget,
        QUERY_LEN=query_len,
        TILE_R=tile_rows,
        BLOCK_N=tile_keys,
        RUN=RUN,
        STAGES=_DECODE_STAGES if query_len else _PROMPT_STAGES,
        # A decode's keys are read once, a prompt's by every tile of rows.
        EVICTION="evict_first" if query_len else "",
        **deal(warps, number_bytes),
        num_warps=warps,
    )
