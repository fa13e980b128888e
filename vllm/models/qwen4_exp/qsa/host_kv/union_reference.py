# SPDX-License-Identifier: Apache-2.0
"""``union_of`` and ``edges_of_sections`` in plain torch: what runs without a GPU, and what the kernels are compared with."""

import torch

from .union import BEYOND, Union

# Tokens whose selections are looked at together, and groups of the pool that are listed together: what either takes
# beside its result is bounded by them.
_TOKENS, _GROUPS = 256, 1 << 18


def selected_slots(
    selected: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, block_size: int
) -> torch.Tensor:
    """``[tokens, width]`` int64 slots in the pool, -1 where a token selects nothing.

    Args:
        selected: ``[tokens, width + 1]`` int32 positions in a request, packed to the left; the last column counts
            them.
        block_table: ``[requests, blocks per request]``.
        token_to_req: ``[tokens]``.
        block_size: tokens in a block.
    """
    positions, counts = selected[:, :-1].long(), selected[:, -1:]
    valid = torch.arange(positions.shape[1], device=selected.device) < counts
    positions = torch.where(valid, positions, 0)
    blocks = block_table[token_to_req.long().unsqueeze(-1), positions // block_size].long()
    return torch.where(valid, blocks * block_size + positions % block_size, -1)


def block_order(
    selected: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, block_size: int, blocks: int
) -> torch.Tensor:
    """``[blocks]`` int64, the pool's blocks: request after request, each one's by position, then those of none.

    Requests that begin alike share blocks, at the same place of each. Such a block is where the first of them has it: the
    fewer share one, the later it is in all of them, so each one's still ascend.

    Args:
        selected, block_table, token_to_req, block_size: as of ``selected_slots``. What the table has beyond the last
            token that a request selects is not looked at.
        blocks: in the pool.
    """
    device, (requests, pages) = selected.device, block_table.shape
    furthest = torch.full((requests,), -1, dtype=torch.int32, device=device)
    for begin in range(0, selected.shape[0], _TOKENS):
        some = slice(begin, begin + _TOKENS)
        positions = selected[some, :-1]
        valid = torch.arange(positions.shape[1], device=device) < selected[some, -1:]
        furthest.scatter_reduce_(
            0, token_to_req[some].long().clamp_min(0), torch.where(valid, positions, -1).amax(1), "amax"
        )
    # Rounding to minus infinity: a request without tokens here has no page.
    there = torch.arange(pages, device=device) <= furthest.unsqueeze(1).div(block_size, rounding_mode="floor")
    place = torch.arange(requests * pages, dtype=torch.int32, device=device)
    first = torch.full((blocks + 1,), BEYOND, dtype=torch.int32, device=device)
    first.scatter_reduce_(0, torch.where(there, block_table, blocks).flatten().long(), place, "amin")
    return first[:blocks].argsort()


def union_of(
    selected: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    block_size: int,
    pool: int,
    limit: int,
    ratio: int,
) -> Union:
    """As ``union.union_of``."""
    device, tokens = selected.device, selected.shape[0]
    parts = [slice(begin, min(tokens, begin + _TOKENS)) for begin in range(0, tokens, _TOKENS)]
    # The last entry takes what is masked.
    needed = torch.zeros(pool + 1, dtype=torch.bool, device=device)
    for some in parts:
        slots = selected_slots(selected[some], block_table, token_to_req[some], block_size)
        needed.scatter_(0, torch.where(slots < 0, pool, slots // ratio).flatten(), True)
    needed[pool].fill_(False)
    per_block = block_size // ratio
    order = block_order(selected, block_table, token_to_req, block_size, pool // per_block)
    ordered = needed[:pool].view(-1, per_block)[order].flatten().cumsum(0, dtype=torch.int32)
    size = ordered[-1].clone()
    number = torch.empty(pool, dtype=torch.int32, device=device)
    number.view(-1, per_block)[order] = ordered.sub_(1).view(-1, per_block)
    groups = torch.empty(limit + 1, dtype=torch.int32, device=device)
    for begin in range(0, pool, _GROUPS):
        some = slice(begin, min(pool, begin + _GROUPS))
        target = torch.where(needed[some], number[some], limit).long()
        groups.scatter_(0, target, torch.arange(some.start, some.stop, dtype=torch.int32, device=device))
    numbers = torch.empty(selected.shape, dtype=torch.int32, device=device)
    numbers[:, -1] = selected[:, -1]
    for some in parts:
        slots = selected_slots(selected[some], block_table, token_to_req[some], block_size)
        place = number[(slots // ratio).clamp_min(0)] * ratio + slots % ratio
        numbers[some, :-1] = torch.where(slots < 0, BEYOND, place)
    return Union(groups, size, numbers)


def edges_of_sections(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """As ``union.edges_of_sections``."""
    begins = torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=numbers.device)
    # The last column is no number.
    ascending = numbers[:, :-1].contiguous()
    edges = torch.searchsorted(ascending, begins.expand(numbers.shape[0], -1).contiguous(), out_int32=True)
    return torch.stack([edges[:, :-1].T, edges[:, 1:].T], -1)
