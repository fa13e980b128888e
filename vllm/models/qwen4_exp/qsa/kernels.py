# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of sparse attention; ``attention.py`` and ``sections.py`` launch them.

A *row* is one query token, its *group* the ``GROUP`` query heads that share a K/V head,
padded to ``BLOCK_M``; *columns* are places in the row's list of selected tokens.

What makes a row independent of its neighbours: split ``s`` of a row has the columns
from ``s * SPLIT`` to ``(s + 1) * SPLIT``, whoever else is in the batch; splits are
joined from left to right; and decode and prefill are made of the same functions
(``softmax.py``), with multiply-adds written out, so that a row has the same bits in both.
"""

from vllm.triton_utils import tl, triton

from .operands import as_operands, load_planes, load_query, store_planes
from .places import extent, places_of
from .softmax import NOTHING, add_columns, finish, join, no_columns, no_tiles, settled


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "table_width"])
def split_kernel(
    q, q_row, q_head, keys, values, key_scales, value_scales, selected, table, table_request, token_to_req,
    accumulators, maxima, normalisers, score_scale, num_requests, num_blocks, table_width,
    FORM: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Decode, first half: one program, one split of one row and K/V head.

    Its state goes to ``[rows, splits, heads, DIM]``, planes one after the other, and
    ``[rows, heads, splits]``; splits beyond a row's columns are not written.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    begin = split * SPLIT
    columns = begin + tl.arange(0, SPLIT)
    # What does not depend on another load is under way before the count says whether there is anything to do. The
    # compiler would rather load queries behind that question; past a barrier it moves no load.
    token = tl.load(selected + row * (WIDTH + 1) + columns, mask=columns < WIDTH, other=-1)
    query = load_query(q + row * q_row, q_head, head * GROUP, FORM, GROUP, BLOCK_M, DIM)
    tl.debug_barrier()
    request, count = extent(selected, token_to_req, num_requests, row, WIDTH)
    if begin >= count:
        return
    # Looked up once, a column to a lane. In the loop every lane would look up the row of each of its loads, which
    # was half of all instructions, and every tile would wait for the list and the table.
    token = tl.where(columns < count, token, -1)
    places = places_of(token, table + request * table_request, table_width, num_blocks, LAYOUT)
    # Meanwhile:
    queries, unit_of_query = as_operands(query, FORM)
    sums, maximum, each, factors = no_tiles(BLOCK_M, DIM, BLOCK_N)
    for first in tl.range(0, tl.minimum(count - begin, SPLIT), BLOCK_N, num_stages=STAGES):
        place = tl.gather(places, first + tl.arange(0, BLOCK_N), 0)
        sums, maximum, each, factors = add_columns(
            sums, maximum, each, factors, queries, unit_of_query * score_scale, place,
            keys, values, key_scales, value_scales, head, FORM, LAYOUT, DIM,
        )  # fmt: skip
    sums, normaliser = settled(sums, each, factors, tl.full((BLOCK_M,), 1.0, tl.float32), FORM)
    heads = tl.arange(0, BLOCK_M)
    mine = heads < GROUP
    every, splits = tl.num_programs(1) * GROUP, tl.num_programs(2)
    heads += head * GROUP
    at = (row * every + heads) * splits + split
    tl.store(maxima + at, maximum, mask=mine)
    tl.store(normalisers + at, normaliser, mask=mine)
    # In the order of planes, whichever dimensions they hold: neighbours lie together.
    store_planes(accumulators, (row * splits + split) * every + heads, DIM, mine, sums, "bf16", DIM)


@triton.jit
def _write(sums, normaliser, value_scale, gate, gate_head, out, out_head, heads, mine, FORM: tl.constexpr,
           DIM: tl.constexpr):  # fmt: skip
    """The gated result of one row's ``heads``, to memory."""
    gates = load_planes(gate, heads, gate_head, mine, FORM, DIM)
    done = finish(sums, normaliser, value_scale, gates, out.dtype.element_ty)
    store_planes(out, heads, out_head, mine, done, FORM, DIM)


@triton.jit(do_not_specialize=["num_requests"])
def row_kernel(
    q, q_row, q_head, keys, values, key_scales, value_scales, places, selected, token_to_req,
    section, accumulators, maxima, normalisers, gate, gate_row, gate_head, out, out_row, out_head,
    score_scale, value_scale, num_requests,
    FORM: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Prefill: one program, all columns of one row and K/V head, split after split.

    ``places`` of the columns are those of ``place_kernel``.

    With ``section`` (``[rows, 2]``: the first column, and the one after the last) only
    those columns, on top of the state in ``[rows, heads, DIM]`` and ``[rows, heads]``,
    which is updated; without it the gated result goes to ``out``.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, end = extent(selected, token_to_req, num_requests, row, WIDTH)
    heads = tl.arange(0, BLOCK_M)
    mine = heads < GROUP
    sums, maximum, normaliser = no_columns(BLOCK_M, DIM)
    begin = 0
    if section is not None:
        begin = tl.maximum(tl.load(section + row * 2), 0)
        end = tl.minimum(end, tl.load(section + row * 2 + 1))
        if begin >= end:
            return
        at = row * (tl.num_programs(1) * GROUP) + head * GROUP + heads
        sums = load_planes(accumulators, at, DIM, mine, FORM, DIM)
        maximum = tl.load(maxima + at, mask=mine, other=NOTHING)
        normaliser = tl.load(normalisers + at, mask=mine, other=0.0)
    query = load_query(q + row * q_row, q_head, head * GROUP, FORM, GROUP, BLOCK_M, DIM)
    queries, unit_of_query = as_operands(query, FORM)
    part, part_maximum, each, factors = no_tiles(BLOCK_M, DIM, BLOCK_N)
    columns = tl.arange(0, BLOCK_N)
    place = tl.load(places + row * PLACES + begin + columns)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        after = first + BLOCK_N
        # A tile ahead, so that no copy of rows waits for their places.
        following = tl.load(places + row * PLACES + after + columns)
        part, part_maximum, each, factors = add_columns(
            part, part_maximum, each, factors, queries, unit_of_query * score_scale, place,
            keys, values, key_scales, value_scales, head, FORM, LAYOUT, DIM,
        )  # fmt: skip
        place = following
        if ((after - begin) % SPLIT == 0) | (after >= end):
            sums, maximum, normaliser = join(sums, maximum, normaliser, part, part_maximum, each, factors, FORM)
            part, part_maximum, each, factors = no_tiles(BLOCK_M, DIM, BLOCK_N)
    if section is not None:
        at = row * (tl.num_programs(1) * GROUP) + head * GROUP + heads
        store_planes(accumulators, at, DIM, mine, sums, FORM, DIM)
        tl.store(maxima + at, maximum, mask=mine)
        tl.store(normalisers + at, normaliser, mask=mine)
    else:
        _write(sums, normaliser, value_scale, gate + row * gate_row, gate_head, out + row * out_row, out_head,
               head * GROUP + heads, mine, FORM, DIM)  # fmt: skip


@triton.jit
def finish_kernel(
    accumulators, normalisers, gate, gate_row, gate_head, out, out_row, out_head, value_scale, DIM: tl.constexpr
):
    """A state in memory to the gated result: one program, one row and query head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = tl.arange(0, 1)
    at = row * tl.num_programs(1) + head + one
    # In memory dimensions are in order, and planes of any kind do: quarters are read in whole lines.
    sums = load_planes(accumulators, at, DIM, one == 0, "bf16", DIM)
    _write(sums, tl.load(normalisers + at), value_scale, gate + row * gate_row, gate_head, out + row * out_row,
           out_head, head + one, one == 0, "bf16", DIM)  # fmt: skip
