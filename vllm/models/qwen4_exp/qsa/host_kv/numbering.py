# SPDX-License-Identifier: Apache-2.0
"""``union_of`` and ``edges_of_sections`` by kernels: a dozen launches for what plain torch takes 350 for.

The host of a GPU launches a prompt from Python, one operation after the other, and on a fast GPU is what a prompt waits
for: in torch the numbers alone took an H200's host 50 ms a chunk of 2,048 tokens and four sparse layers, beside the 70 that
it takes for everything else, and its GPU 7 of 44.

    mark      groups that a token selects; how far each request's tokens reach
    own       the place in the block table that a block is numbered at: the first that names it
    count     marked groups of each place's block
    number    groups of a block in order, from the sum of all before on
    look up   each token's selection as numbers
    edges     where sections begin in it, by bisection
"""

import torch

from vllm.triton_utils import tl, triton

from .union import BEYOND, Union

# Columns, groups and places of one program; edges of one.
_COLUMNS, _GROUPS, _PLACES, _EDGES = 512, 1024, 512, 32


@triton.jit
def _selection(
    selected_ptr, token_to_req_ptr, table_ptr, stride_selected, stride_table,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program's token, its request and columns; of these positions, their groups in the pool, where there are any."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = selected_ptr + token * stride_selected
    mine = columns < tl.minimum(tl.load(row + WIDTH), WIDTH)
    position = tl.load(row + columns, mask=mine, other=0)
    request = tl.load(token_to_req_ptr + token)
    block = tl.load(table_ptr + request.to(tl.int64) * stride_table + position // BLOCK_SIZE, mask=mine, other=0)
    group = block * (BLOCK_SIZE // RATIO) + position % BLOCK_SIZE // RATIO
    return token, request, columns, position, group, mine


# Slices of a step begin at any token: compiled for aligned ones too, a kernel would be compiled again while somebody waits.
@triton.jit(do_not_specialize=["selected_ptr", "token_to_req_ptr", "stride_table"])
def mark_kernel(
    selected_ptr, token_to_req_ptr, table_ptr, needed_ptr, furthest_ptr, stride_selected, stride_table,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``needed`` ``[pool]`` becomes 1 where a token selects the group; ``furthest`` ``[requests]`` its last position."""
    _, request, _, position, group, mine = _selection(
        selected_ptr, token_to_req_ptr, table_ptr, stride_selected, stride_table, WIDTH, BLOCK_SIZE, RATIO, COLUMNS
    )
    tl.store(needed_ptr + group, 1, mask=mine)
    last = tl.max(tl.where(mine, position, -1), axis=0)
    tl.atomic_max(furthest_ptr + request, last, mask=last >= 0)


@triton.jit
def _block_at(place, pages, table_ptr, furthest_ptr, stride_table, BLOCK_SIZE: tl.constexpr, mask):
    """The block of a place in the table, and whether its request's tokens reach it."""
    request, page = place // pages, place % pages
    there = mask & (page * BLOCK_SIZE <= tl.load(furthest_ptr + request, mask=mask, other=-1))
    return tl.load(table_ptr + request.to(tl.int64) * stride_table + page, mask=there, other=0), there


@triton.jit(do_not_specialize=["places", "pages", "stride_table"])
def own_kernel(
    table_ptr, furthest_ptr, first_ptr, places, pages, stride_table, BLOCK_SIZE: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """``first`` ``[blocks]`` becomes the first place that names the block."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    block, there = _block_at(place, pages, table_ptr, furthest_ptr, stride_table, BLOCK_SIZE, place < places)
    tl.atomic_min(first_ptr + block, place, mask=there)


@triton.jit(do_not_specialize=["pages", "stride_table"])
def count_kernel(
    needed_ptr, table_ptr, furthest_ptr, first_ptr, counts_ptr, pages, stride_table,
    BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``counts`` ``[places]``: marked groups of the block that a place is the first to name, none otherwise."""
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // RATIO
    place = tl.program_id(0)
    block, there = _block_at(place, pages, table_ptr, furthest_ptr, stride_table, BLOCK_SIZE, True)
    own = there & (tl.load(first_ptr + block) == place)
    marks = tl.zeros([GROUPS], tl.int32)
    for begin in range(0, PER_BLOCK, GROUPS):
        within = begin + tl.arange(0, GROUPS)
        marks += tl.load(needed_ptr + block * PER_BLOCK + within, mask=own & (within < PER_BLOCK), other=0)
    tl.store(counts_ptr + place, tl.sum(marks, axis=0))


@triton.jit(do_not_specialize=["pages", "limit", "stride_table"])
def number_kernel(
    needed_ptr, table_ptr, counts_ptr, ends_ptr, number_ptr, groups_ptr, size_ptr, pages, limit, stride_table,
    BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``number`` ``[pool]`` of each marked group, ``groups`` by number, and ``size``; ``ends`` are sums of ``counts``."""
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // RATIO
    place = tl.program_id(0)
    count, end = tl.load(counts_ptr + place), tl.load(ends_ptr + place)
    tl.store(size_ptr, end, mask=place == tl.num_programs(0) - 1)
    # A place whose block is another's counts none, and what the table has there may be anything.
    first = tl.load(table_ptr + (place // pages).to(tl.int64) * stride_table + place % pages) * PER_BLOCK
    base = end - count
    for begin in range(0, PER_BLOCK, GROUPS):
        within = begin + tl.arange(0, GROUPS)
        inside = (within < PER_BLOCK) & (count > 0)
        marks = tl.load(needed_ptr + first + within, mask=inside, other=0).to(tl.int32)
        number = base + tl.cumsum(marks, axis=0) - marks
        tl.store(number_ptr + first + within, number, mask=marks > 0)
        tl.store(groups_ptr + number, first + within, mask=(marks > 0) & (number < limit))
        base += tl.sum(marks, axis=0)


@triton.jit(do_not_specialize=["selected_ptr", "token_to_req_ptr", "stride_table"])
def look_up_kernel(
    selected_ptr, token_to_req_ptr, table_ptr, number_ptr, numbers_ptr, stride_selected, stride_table,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, BEYOND: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``numbers`` ``[tokens, WIDTH + 1]`` of a Union."""
    token, _, columns, position, group, mine = _selection(
        selected_ptr, token_to_req_ptr, table_ptr, stride_selected, stride_table, WIDTH, BLOCK_SIZE, RATIO, COLUMNS
    )
    number = tl.load(number_ptr + group, mask=mine, other=0) * RATIO + position % RATIO
    number = tl.where(mine, number, BEYOND)
    number = tl.where(columns == WIDTH, tl.load(selected_ptr + token * stride_selected + WIDTH), number)
    tl.store(numbers_ptr + token * (WIDTH + 1) + columns, number, mask=columns <= WIDTH)


@triton.jit(do_not_specialize=["size", "count", "stride_edges"])
def edges_kernel(
    numbers_ptr, edges_ptr, size, count, stride_edges, WIDTH: tl.constexpr, STEPS: tl.constexpr, EDGES: tl.constexpr
):  # fmt: skip
    """``edges`` ``[count, tokens, 2]``: columns of a token before ``EDGES`` multiples of ``size``."""
    token = tl.program_id(0).to(tl.int64)
    edge = tl.program_id(1) * EDGES + tl.arange(0, EDGES)
    row = numbers_ptr + token * (WIDTH + 1)
    low = tl.zeros([EDGES], tl.int32)
    high = low + WIDTH
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        below = open_ & (tl.load(row + middle, mask=open_, other=0) < edge * size)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    at = edges_ptr + edge.to(tl.int64) * stride_edges + token * 2
    tl.store(at, low, mask=edge < count)
    tl.store(at - stride_edges + 1, low, mask=(edge > 0) & (edge <= count))


def union_of(
    selected: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    block_size: int,
    pool: int,
    limit: int,
    ratio: int,
) -> Union:
    """As ``union.union_of``; of groups beyond ``limit``, which is to be a bound, only the numbers are made."""
    device, (tokens, width) = selected.device, selected.shape
    requests, pages = block_table.shape
    places, whole = requests * pages, {"dtype": torch.int32, "device": device}
    needed = torch.zeros(pool, dtype=torch.int8, device=device)
    furthest = torch.full((requests,), -1, **whole)
    first = torch.full((pool // (block_size // ratio),), BEYOND, **whole)
    shape = {"BLOCK_SIZE": block_size, "RATIO": ratio}
    strides = selected.stride(0), block_table.stride(0)
    grid = tokens, triton.cdiv(width, _COLUMNS)
    mark_kernel[grid](
        selected, token_to_req, block_table, needed, furthest, *strides, WIDTH=width - 1, COLUMNS=_COLUMNS, **shape
    )
    own_kernel[(triton.cdiv(places, _PLACES),)](
        block_table, furthest, first, places, pages, strides[1], BLOCK_SIZE=block_size, PLACES=_PLACES
    )
    counts = torch.empty(places, **whole)
    count_kernel[(places,)](needed, block_table, furthest, first, counts, pages, strides[1], GROUPS=_GROUPS, **shape)
    ends = counts.cumsum(0, dtype=torch.int32)
    number, groups, size = torch.empty(pool, **whole), torch.empty(limit + 1, **whole), torch.empty((), **whole)
    number_kernel[(places,)](
        needed, block_table, counts, ends, number, groups, size, pages, limit, strides[1], GROUPS=_GROUPS, **shape
    )
    numbers = torch.empty(selected.shape, **whole)
    look_up_kernel[grid](
        selected, token_to_req, block_table, number, numbers, *strides,
        WIDTH=width - 1, BEYOND=BEYOND, COLUMNS=_COLUMNS, **shape,
    )  # fmt: skip
    return Union(groups, size, numbers)


def edges_of_sections(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """As ``union.edges_of_sections``."""
    tokens, width = numbers.shape
    # Each section's begin on 16 bytes, for which the kernels that read them are compiled.
    edges = torch.empty(count, tokens + tokens % 2, 2, dtype=torch.int32, device=numbers.device)
    edges_kernel[(tokens, triton.cdiv(count + 1, _EDGES))](
        numbers,
        edges,
        size,
        count,
        edges.stride(0),
        WIDTH=width - 1,
        STEPS=width.bit_length(),
        EDGES=_EDGES,
        num_warps=1,
    )
    return edges[:, :tokens]
