# SPDX-License-Identifier: Apache-2.0
"""From raw index keys to one mean per complete group, and rows into paged caches.

Caches are ``[pages, page_size, 1, width]``; a slot is ``page * page_size + offset``
and a negative slot is a row that is not kept.
"""

import torch

from ...qsa.index_keys import codes, rounded
from ..hyperconnection import grouped_gemma_rmsnorm


def gemma_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS-normalise the rows of ``[rows, width]`` and scale by ``1 + weight``."""
    return grouped_gemma_rmsnorm(x, weight, eps, 1)


def qsa_store_cache_rows(
    cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor
) -> None:
    """Write rows into their slots, in place, as ``rounded`` rounds them.

    Args:
        cache: ``[pages, page_size, 1, width]``, may be strided.
        slot_mapping: ``[rows]``; rows with a slot outside the cache are dropped.
        rows: ``[rows, width]`` or ``[rows, 1, width]``.

    Raises ValueError where shapes do not fit.

    """
    if cache.ndim != 4 or cache.shape[2] != 1:
        raise ValueError(
            f"a QSA cache is [pages, page_size, 1, width], got {tuple(cache.shape)}"
        )
    rows = rows.reshape(-1, cache.shape[3]) if rows.numel() else rows[:0]
    slots = slot_mapping.long()
    if rows.shape[0] != slots.numel():
        raise ValueError(f"{rows.shape[0]} QSA rows for {slots.numel()} slots")
    page_size = cache.shape[1]
    kept = (slots >= 0) & (slots < cache.shape[0] * page_size)
    slots = slots[kept]
    codes(cache)[slots // page_size, slots % page_size, 0] = codes(rounded(rows[kept], cache.dtype))


def qsa_compress_groups_with_ratio(
    raw_keys: torch.Tensor, raw_positions: torch.Tensor, compressor_state_cache: torch.Tensor,
    compressor_state_block_table: torch.Tensor, token_to_req: torch.Tensor,
    query_start_loc: torch.Tensor, logical_positions: torch.Tensor, compressed_slots: torch.Tensor,
    compress_ratio: int, rope_cache: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Average every group of raw keys that this step completes.

    A group's members come from this step's rows or, where the group began in an
    earlier step, from the request's ring.  Must run before the ring is updated.

    Args:
        raw_keys: ``[rows, 1, width]``, this step's keys.
        raw_positions: ``[rows, 1, 3]`` int64, their rotary positions.
        compressor_state_cache: ``[blocks, ring, 1, width]``; position ``p`` of a
            request is at ``p % ring`` of its one block.
        compressor_state_block_table: ``[requests, >= 1]``.
        token_to_req: ``[rows]``.
        query_start_loc: ``[requests + 1]``, first row of each request.
        logical_positions: ``[rows]``; -1 on padding.
        compressed_slots: ``[rows]``, >= 0 on a row that ends a group.
        compress_ratio: tokens in a group.
        rope_cache: ``[blocks, ring, 1, 3]`` int64 beside the ring, or None where
            a token's rotary position is its logical one.

    Returns ``(means, first_positions)``: ``[rows, 1, width]`` in the keys' dtype
    and ``[rows, 3]`` int64, the rotary position of each group's first token.  Rows
    that end no group hold zeros in both.

    """
    rows, _, width = raw_keys.shape
    means = raw_keys.new_zeros(rows, 1, width)
    firsts = torch.zeros(rows, 3, dtype=torch.int64, device=raw_keys.device)
    ends = (compressed_slots[:rows] >= 0) & (logical_positions >= compress_ratio - 1)
    row = ends.nonzero().flatten()
    if not row.numel():
        return means, firsts

    request = token_to_req[row].long()
    begin = query_start_loc[request].long()
    last = logical_positions[row].long()
    back = torch.arange(compress_ratio - 1, -1, -1, device=row.device)
    members = last.unsqueeze(-1) - back
    # How many rows before `row` a member lies tells where it is to be found.
    source = row.unsqueeze(-1) - back
    in_step = source >= begin.unsqueeze(-1)
    source = source.clamp_min(0)
    block = compressor_state_block_table[request, 0].long().unsqueeze(-1)
    offset = members % compressor_state_cache.shape[1]

    kept = compressor_state_cache[block, offset, 0]
    keys = torch.where(in_step.unsqueeze(-1), raw_keys[source, 0], kept)
    means[row, 0] = keys.float().mean(1).to(means.dtype)

    if rope_cache is None:
        firsts[row] = members[:, :1]
    else:
        firsts[row] = torch.where(
            in_step[:, :1],
            raw_positions[source[:, 0], 0],
            rope_cache[block[:, 0], offset[:, 0], 0],
        )
    return means, firsts
