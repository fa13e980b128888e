# SPDX-License-Identifier: Apache-2.0
"""Which rows of the block pool a prompt's chunk reads, and where each token finds them.

Every token of a chunk selects rows on its own, up to the indexer's budget of them, and
neighbours select nearly the same. Read one by one over PCIe, a chunk of 512 tokens would
take 512 x 2048 rows; what it takes is their union, at most the context. Rows are selected
in the groups that share a pooled key, so it is a union of groups. They are numbered request
after request and by position, so that a section of the union is a range of numbers, and
each token's rows ascend as in its selection, wherever the pool has them:

    blocks     of one request, two groups each      4, 2, 35
    groups     which ones tokens select             9 5 | 9 5 70 | 70
    numbers    0, 1, 2 for 9, 5, 70                 0 1 | 0 1  2 | 2
    sections   of two groups each                   {9, 5}, {70}

Nothing here waits for the device, so a chunk can be queued while the one before runs. That
is why sizes are bounds: what lies beyond the union is masked.
"""

from dataclasses import dataclass
from types import ModuleType

import torch

# Larger than any number of a row.
BEYOND = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Union:
    """The groups of rows that a chunk reads.

    Attributes:
        groups: ``[limit + 1]`` int32, the union in the order of its numbers; beyond it and in the last entry, anything.
        size: ``[]`` int32, how many there are.
        numbers: ``[tokens, width + 1]`` int32, each token's selection in its order, row ``r`` of the group with
            number ``n`` as ``n * ratio + r``; BEYOND where there is none, and their number in the last column.

    """

    groups: torch.Tensor
    size: torch.Tensor
    numbers: torch.Tensor


def _on(device: torch.device) -> ModuleType:
    """The kernels on a GPU, the same in torch elsewhere; both import this module."""
    if device.type == "cpu":
        from . import union_reference as module
    else:
        from . import numbering as module
    return module


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

    Requests that begin alike share blocks, at the same place of each. Such a block is where the first of them has it: the
    fewer share one, the later it is in all of them, so each one's numbers still ascend.

    Args:
        selected: ``[tokens, width + 1]`` int32 positions in a request, ascending and packed to the left; the last column
            counts them.
        block_table: ``[requests, blocks per request]`` int32. What it has beyond the last token that a request selects is
            not looked at.
        token_to_req: ``[tokens]`` int32.
        block_size: tokens in a block, a multiple of ``ratio``.
        pool: groups in the pool, of whole blocks.
        limit: bound of how many different ones there are.
        ratio: rows of a group, which are ``slot // ratio``.
    """
    return _on(selected.device).union_of(selected, block_table, token_to_req, block_size, pool, limit, ratio)


def edges_of_sections(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Which of each token's columns are in which section of ``size`` rows.

    Args:
        numbers: of a Union.
        size: rows of a section.
        count: sections.

    Returns ``[count, tokens, 2]`` int32: of each section and token the first column, and the one after the last.

    """
    return _on(numbers.device).edges_of_sections(numbers, size, count)
