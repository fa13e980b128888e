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

Of a prompt, keys may come copied out of their pages (``unpaged.py``): the same numbers in the
same order, so that scores are the same bits, and nothing but copies, products and stores is
left in the loop.
"""

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.platform_utils import num_compute_units

from .e4m3 import infinite_to_nan
from .index_keys import halves, in_halves, words

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
# Of e4m3, whose queries a program has to decode first: of 16,384 programs, 8 requests of 250,000 tokens take 40.7 instead
# of 36.9 us. In bf16 they take 48.1, and 49.3 of so few.
_DECODE_PROGRAMS_E4M3 = 4096
# One of a prompt, which first reads 32 KiB of q, takes about so many, fewer where a GPU could run more programs at once.
# Of 16, 2,048 rows at 65,536 tokens take 343 instead of 298 us: programs are left over, for which most of an H200 waits.
_PROMPT_TILES = 32
# With 2 the next tile is asked for after this one's scores are stored, and nothing hides its way. With 3 it is on its way
# during all of that, if its address is known by then: not of keys in pages.
_PROMPT_STAGES = 2
_COPY_STAGES = 3
# Keys of a decode's tile. With one tile a program there is nothing to load ahead.
_DECODE_KEYS = BLOCK_N
_DECODE_STAGES = 1

_WITHOUT_SIGN = tl.constexpr(0x7FFFFFFF)
# One above the largest that is written, the end of a range, has to be an integer as well.
_MOST = tl.constexpr(0x7FFFFFFE)


@triton.jit
def _load_queries(base, there, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """The queries at ``base``, ``[width, lanes]``; zeros where not ``there``.  Two halves of the width from words.

    ``WHOLE``: those one after the other in one, as ``unpaged.py`` has keys.
    """
    if base.dtype.element_ty == tl.int32:
        word = tl.arange(0, triton.next_power_of_2(DIM // 4))
        at = base[:, None] + word[None, :]
        codes = tl.load(at, mask=there[:, None] & (word < DIM // 4)[None, :], other=0)
        if WHOLE:
            return (tl.trans(in_halves(codes)),)
        else:
            even, odd = halves(codes)
            return tl.trans(even), tl.trans(odd)
    else:
        dim = tl.arange(0, max(16, triton.next_power_of_2(DIM)))
        return (tl.load(base[None, :] + dim[:, None], mask=there[None, :] & (dim < DIM)[:, None], other=0.0),)


@triton.jit
def _unpaged_products(base, query, WIDTH: tl.constexpr):
    """Of ``WIDTH`` numbers at each of ``base`` with ``query``: ``[keys, lanes]``."""
    key = tl.load(base[:, None] + tl.arange(0, WIDTH)[None, :])
    return tl.dot(key, query[0], out_dtype=tl.float32)


@triton.jit
def _products(base, there, query, DIM: tl.constexpr, EVICTION: tl.constexpr):
    """Of the keys at ``base``, zeros where not ``there``, with ``query``: ``[keys, lanes]``, NaN where a number is none."""
    if base.dtype.element_ty == tl.int32:
        word = tl.arange(0, triton.next_power_of_2(DIM // 4))
        codes = tl.load(
            base[:, None] + word[None, :],
            mask=there[:, None] & (word < DIM // 4)[None, :],
            other=0,
            eviction_policy=EVICTION,
        )
        even, odd = halves(codes)
        product = tl.dot(even, query[0], out_dtype=tl.float32)
        return infinite_to_nan(tl.dot(odd, query[1], acc=product))
    else:
        dim = tl.arange(0, max(16, triton.next_power_of_2(DIM)))
        key = tl.load(
            base[:, None] + dim[None, :],
            mask=there[:, None] & (dim < DIM)[None, :],
            other=0.0,
            eviction_policy=EVICTION,
        )
        return tl.dot(key, query[0], out_dtype=tl.float32)


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
        q_ptr + q_row.to(tl.int64) * stride_q_row + head * stride_q_head, (q_row < end) & (head < HEADS), DIM, PAGE == 0
    )
    at_row = (row - first_row).to(tl.int64)
    for number in tl.range(tile, last_tile, num_stages=STAGES):
        column = number * BLOCK_N + member
        if PAGE == 0:
            # What lies behind the last key that a row sees is nothing; its scores become -1.
            product = _unpaged_products(
                k_cache_ptr + request.to(tl.int64) * stride_cache_page + column * stride_cache_token,
                query,
                max(16, triton.next_power_of_2(DIM)),
            )
        else:
            live = column < most
            page = tl.load(
                page_table_ptr + request.to(tl.int64) * stride_table + tl.minimum(column // PAGE, page_table_width - 1),
                mask=live,
                other=0,
            )
            product = _products(
                k_cache_ptr + page.to(tl.int64) * stride_cache_page + column % PAGE * stride_cache_token,
                live,
                query,
                DIM,
                EVICTION,
            )
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
        product = tl.sum(tl.reshape(product, (BLOCK_N, HEADS_P // 2, TILE_R, 2)), axis=3)
        score = tl.reshape(tl.sum(product, axis=1), (BLOCK_N // 16, 2, 8, TILE_R))
        score = tl.reshape(tl.permute(score, (0, 2, 1, 3)), (BLOCK_N, TILE_R))
        column = number * BLOCK_N + tl.arange(0, BLOCK_N)
        # The sign bit of a -0 goes, and a NaN's, which is above infinity without.
        ordered = tl.minimum(score.to(tl.int32, bitcast=True) & _WITHOUT_SIGN, _MOST)
        # To the tile's end, so that who reads whole runs need not look where the row ends.
        ordered = tl.where(column[:, None] < visible[None, :], ordered, -1)
        tl.store(keys_ptr + at_row[None, :] * stride_keys + column[:, None], ordered, mask=(row < end)[None, :])
        top = tl.max(tl.reshape(ordered, (BLOCK_N // RUN, RUN, TILE_R)), axis=1)
        run = number * (BLOCK_N // RUN) + tl.arange(0, BLOCK_N // RUN)
        tl.store(tops_ptr + at_row[None, :] * stride_tops + run[:, None], top, mask=(row < end)[None, :])


def _warp_groups() -> bool:
    return current_platform.has_device_capability(90) and not current_platform.has_device_capability(120)


def _prompt_warps() -> int:
    """One warp group multiplies a tile where there are such; two would share it by heads and have to exchange sums.

    Elsewhere eight: a tile of that size leaves room for one program, and four warps wait for each other.
    """
    return 4 if _warp_groups() else 8


def _programs_at_once() -> int:
    """Of a prompt, on this GPU: one on a multiprocessor that has 100 KiB of shared memory, two where it has more."""
    less = current_platform.has_device_capability(86) and not _warp_groups()
    return num_compute_units() * (1 if less else 2)


def _prompt_tiles(row_tiles: int, key_tiles: int, at_once: int) -> int:
    """Key tiles of a program, such that programs are a little fewer than a multiple of those that run ``at_once``."""
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
            multiple of 4, and 32 or more. Or what ``unpaged`` made of it.
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
    dim = q.shape[2]
    q, k_cache = words(q), words(k_cache)
    heads = max(2, triton.next_power_of_2(q.shape[1]))
    # A tile holds a decode request whole, and at least 16 query heads: fewer would not
    # take the matrix instruction.  Four rows, so that a thread has all heads of one.
    tile_rows = max(16 // heads, 4, triton.next_power_of_2(query_len)) if query_len else _PROMPT_ROWS
    tile_keys = _DECODE_KEYS if query_len else BLOCK_N
    paged = k_cache.dim() == 4
    key_tiles = triton.cdiv(columns, tile_keys)
    row_tiles = triton.cdiv(min(count, max_query_len), tile_rows)
    all_row_tiles = page_table.shape[0] * row_tiles
    if query_len:
        programs = _DECODE_PROGRAMS if q.dtype is torch.bfloat16 else _DECODE_PROGRAMS_E4M3
        tiles = triton.cdiv(all_row_tiles * key_tiles, programs)
    else:
        tiles = _prompt_tiles(all_row_tiles, key_tiles, _programs_at_once())
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
        PAGE=k_cache.shape[1] if paged else 0,
        HEADS=q.shape[1],
        DIM=dim,
        BUDGET=budget,
        QUERY_LEN=query_len,
        TILE_R=tile_rows,
        BLOCK_N=tile_keys,
        RUN=RUN,
        STAGES=_DECODE_STAGES if query_len else _PROMPT_STAGES if paged else _COPY_STAGES,
        # A decode's keys are read once, a prompt's by every tile of rows.
        EVICTION="evict_first" if query_len else "",
        num_warps=4 if query_len else _prompt_warps(),
    )
