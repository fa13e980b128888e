# SPDX-License-Identifier: Apache-2.0
"""Where listed tokens lie: block and place in one int32, ``block << place_bits | place``.

A prompt's rows are read by a program for every K/V head, once as keys and once as values,
and each lane of a program copies parts of many rows.  Looked up there, the block table is
read, tokens are divided by the block size and both are checked some sixty times for every
column, and a load waits for two others.  ``place_kernel`` does that once.
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
    """The places of ``token``, int32; -1 where it is negative, or its block not in the table or the pool."""
    page = tl.maximum(token, 0) // LAYOUT.block_size
    there = (token >= 0) & (page < table_width)
    block = tl.load(table + page, mask=there, other=-1)
    packed = (block << LAYOUT.place_bits) | tl.maximum(token, 0) % LAYOUT.block_size
    return tl.where(there & (block >= 0) & (block < num_blocks), packed, -1)


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
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``places`` ``[rows, WIDTH]`` of ``BLOCK`` columns of one row.

    Columns past the row's count, or outside its ``section`` (``row_kernel``), are neither
    read nor written.
    """
    row = tl.program_id(0).to(tl.int64)
    request, count = extent(selected, token_to_req, num_requests, row, WIDTH)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = columns < count
    if section is not None:
        mine = mine & (columns >= tl.load(section + row * 2)) & (columns < tl.load(section + row * 2 + 1))
    token = tl.load(selected + row * (WIDTH + 1) + columns, mask=mine, other=-1)
    found = places_of(token, table + request * table_request, table_width, num_blocks, LAYOUT)
    tl.store(places + row * WIDTH + columns, found, mask=mine)


def placed(
    rows: Rows, selected: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor,
    section: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:  # fmt: skip
    """Places of ``selected``, ``[some rows, width]`` at a time: as many as the workspace holds.

    That is the indexer's, which is done with it (``qsa_workspace.py``): what is yielded
    lasts until the next is asked for.  ``section``: ``[rows, 2]``, as in ``row_kernel``.
    """
    count, width = selected.shape[0], selected.shape[1] - 1
    space = indexer_workspace(selected.device, width * selected.element_size())
    step = space.numel() // width
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        places = space[: (part.stop - first) * width].view(-1, width)
        place_kernel[(len(places), triton.cdiv(width, BLOCK))](
            places, selected[part], None if section is None else section[part], block_table, block_table.stride(0),
            token_to_req[part], block_table.shape[0], rows.blocks, block_table.shape[1],
            LAYOUT=rows.layout, WIDTH=width, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        yield part, places
