# SPDX-License-Identifier: Apache-2.0
"""Which rows of the block pool a prompt's chunk reads, and where each token finds them.

Every token of a chunk selects rows on its own, up to the indexer's budget of them, and
neighbours select nearly the same. Read one by one over PCIe, a chunk of 512 tokens would
take 512 x 2048 rows; what it takes is their union, at most the context. Rows are selected
in the groups that share a pooled key, so it is a union of groups. They are numbered in the
order of the pool, so that a section of the union is a range of numbers:

    groups     which ones tokens select             5 9 | 9 5 70 | 70
    numbers    0, 1, 2 for 5, 9, 70                 0 1 | 1 0  2 | 2
    sections   of two groups each                   {5, 9}, {70}

Nothing here waits for the device, so a chunk can be queued while the one before runs. That
is why sizes are bounds: what lies beyond the union is masked.
"""

from dataclasses import dataclass

import torch

# Larger than any number of a row.
BEYOND = torch.iinfo(torch.int32).max

# Tokens whose selections are looked at together, and groups of the pool that are listed together: what either takes
# beside its result is bounded by them.
_TOKENS, _GROUPS = 256, 1 << 18


@dataclass(frozen=True)
class Union:
    """The groups of rows that a chunk reads.

    Attributes:
        groups: ``[limit + 1]`` int32, the union in ascending order; beyond it and in the last entry, anything.
        size: ``[]`` int32, how many there are.
        numbers: ``[tokens, width + 1]`` int32, each token's selection in ascending order, row ``r`` of the group with
            number ``n`` as ``n * ratio + r``; BEYOND where there is none, and their number in the last column.

    """

    groups: torch.Tensor
    size: torch.Tensor
    numbers: torch.Tensor


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


def union_of(
    selected: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    block_size: int,
    pool: int,
    limit: int,
    ratio: int,
) -> Union:
    """Number the groups whose rows tokens select.

    Args:
        selected, block_table, token_to_req, block_size: as of ``selected_slots``.
        pool: groups in the pool.
        limit: bound of how many different ones there are.
        ratio: rows of a group, which are ``slot // ratio``.
    """
    device, tokens = selected.device, selected.shape[0]
    parts = [slice(begin, min(tokens, begin + _TOKENS)) for begin in range(0, tokens, _TOKENS)]
    # The last entry takes what is masked.
    needed = torch.zeros(pool + 1, dtype=torch.bool, device=device)
    for some in parts:
        slots = selected_slots(selected[some], block_table, token_to_req[some], block_size)
        needed.scatter_(0, torch.where(slots < 0, pool, slots // ratio).flatten(), True)
    needed[pool].fill_(False)
    number = needed.cumsum(0, dtype=torch.int32) - 1
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
        numbers[some, :-1] = torch.where(slots < 0, BEYOND, place).sort(-1).values
    return Union(groups, number[pool] + 1, numbers)


def edges_of_sections(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Which of each token's columns are in which section of ``size`` rows.

    Args:
        numbers: of a Union.
        size: rows of a section.
        count: sections.

    Returns ``[tokens, count + 1]`` int32: the columns of section ``n`` begin at entry ``n`` and end before entry
    ``n + 1``.

    """
    begins = torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=numbers.device)
    # The last column is no number.
    ascending = numbers[:, :-1].contiguous()
    return torch.searchsorted(ascending, begins.expand(numbers.shape[0], -1).contiguous(), out_int32=True)
