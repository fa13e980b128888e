# SPDX-License-Identifier: Apache-2.0
"""Where listed tokens lie: the distance of a token's row from the first, in ``launch.Layout``'s units, as an int32.

Of a pool in which an int32 does not hold that, it is the block and the place in it, side by side
(``within_bits``).  On sm_86 a tile of an int8 prompt is 613 instructions then, instead of 549; distances
as int64 are a sixth more than that.

A prompt's rows are read by a program for every K/V head, once as keys and once as values,
and each lane of a program copies parts of many rows.  Looked up there, the block table is
read, tokens are divided by the block size and both are checked some sixty times for every
column, and a load waits for two others.  ``place_kernel`` does that once.  Decode has no
launch to spare: a program looks up its split, a column to a lane (``kernels.split_kernel``).
"""

from collections.abc import Iterator

import torch

from vllm.triton_utils import tl, triton

from ..qsa_workspace import indexer_workspace
from .launch import Rows

# Columns of one program: four to a lane.
BLOCK = 512


@triton.jit
def places_of(token, table, table_width, num_blocks, LAYOUT: tl.constexpr):
    """The places of ``token``; -1 where it is negative, or its block not in the table or the pool."""
    page = tl.maximum(token, 0) // LAYOUT.block_size
    there = (token >= 0) & (page < table_width)
    block = tl.load(table + page, mask=there, other=-1)
    within = tl.maximum(token, 0) % LAYOUT.block_size
    if LAYOUT.within_bits:
        place = (block << LAYOUT.within_bits) + within
    else:
        place = block * LAYOUT.block_units + within * LAYOUT.token_units
    return tl.where(there & (block >= 0) & (block < num_blocks), place, -1)


@triton.jit
def row_at(place, LAYOUT: tl.constexpr):
    """How far from the first row the one at ``place`` is, in elements, int64; anything of a negative ``place``."""
    if LAYOUT.within_bits:
        # As if blocks had 2^within_bits tokens, and what they lie farther apart than that, or less far.
        more: tl.constexpr = LAYOUT.unit * (LAYOUT.block_units - (LAYOUT.token_units << LAYOUT.within_bits))
        token: tl.constexpr = LAYOUT.unit * LAYOUT.token_units
        return place.to(tl.int64) * token + (place >> LAYOUT.within_bits).to(tl.int64) * more
    else:
        return place.to(tl.int64) * LAYOUT.unit


@triton.jit
def extent(selected, token_to_req, num_requests, row, WIDTH: tl.constexpr):
    """A row's request, and its number of columns: none where there is no such request."""
    request = tl.load(token_to_req + row)
    known = (request >= 0) & (request < num_requests)
    count = tl.load(selected + row * (WIDTH + 1) + WIDTH)
    return tl.where(known, request, 0).to(tl.int64), tl.where(known, tl.minimum(count, WIDTH), 0)


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "table_width"])
def place_kernel(
    places, selected, section, table, table_request, token_to_req, num_requests, num_blocks, table_width,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``places`` ``[rows, PLACES]``: ``BLOCK`` columns of one row; -1 past its count and outside its ``section``."""
    row = tl.program_id(0).to(tl.int64)
    request, count = extent(selected, token_to_req, num_requests, row, WIDTH)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = columns < count
    if section is not None:
        mine = mine & (columns >= tl.load(section + row * 2)) & (columns < tl.load(section + row * 2 + 1))
    token = tl.load(selected + row * (WIDTH + 1) + columns, mask=mine, other=-1)
    found = places_of(token, table + request * table_request, table_width, num_blocks, LAYOUT)
    tl.store(places + row * PLACES + columns, found, mask=columns < PLACES)


def placed(
    rows: Rows, selected: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, block_n: int,
    section: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:  # fmt: skip
    """Places of ``selected``, ``[some rows, columns]`` at a time: as many rows as the workspace holds.

    That is the indexer's, which is done with it (``qsa_workspace.py``): what is yielded
    lasts until the next is asked for.  Rows end in ``2 * block_n`` or more columns of -1,
    so that tiles that begin at any column are read without a mask, and one beyond the last.
    ``section``: ``[rows, 2]``, as in ``row_kernel``.
    """
    count, width = selected.shape[0], selected.shape[1] - 1
    columns = triton.cdiv(width, 32) * 32 + 2 * block_n
    space = indexer_workspace(selected.device, columns * selected.element_size())
    step = space.numel() // columns
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        places = space[: (part.stop - first) * columns].view(-1, columns)
        place_kernel[(len(places), triton.cdiv(columns, BLOCK))](
            places, selected[part], None if section is None else section[part], block_table, block_table.stride(0),
            token_to_req[part], block_table.shape[0], rows.blocks, block_table.shape[1],
            LAYOUT=rows.layout, WIDTH=width, PLACES=columns, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        yield part, places
