# SPDX-License-Identifier: Apache-2.0
"""How the prefill tokens of one micro-batch are divided between prompts.

First come, first served between prompts of like length.  The first in line leaves a part to prompts that have much
less to do, the shortest of them first: someone with 3,000 tokens behind 230,000 waits for a few micro-batches instead
of all of them, and the long prompt takes at most 1/share as long as alone.  Nobody starves: whoever has
waited longest is first in line and keeps its part, so every prompt becomes the first one day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

#: A prompt is "much shorter" with at most 1/SHORTER of the tokens that the first in line has left.  Nearer to 1, two
#: prompts of about one length would run side by side and both end late.
SHORTER = 2


@dataclass(frozen=True)
class Prefill:
    """A prompt with tokens left to compute."""

    request_id: str
    left: int
    #: Whether it takes one of the free seats, as a request does that is not running yet.
    needs_seat: bool = False
    #: Smaller is served first; equal unless the policy is "priority".
    priority: int = 0


def divide(prefills: Sequence[Prefill], budget: int, seats: int, long_share: float, chunk: int) -> dict[str, int]:
    """Tokens for each prompt, by request id; 0 for those that have to wait.

    Args:
        prefills: in the order of service, which is by priority first
        budget: tokens to divide
        seats: requests that may start
        long_share: part of the budget that the first of a priority keeps while much shorter ones wait
        chunk: tokens that a prompt may take at most

    The sum is the budget or, where that is less, all that the prompts with a seat may take.
    """
    granted = dict.fromkeys((prefill.request_id for prefill in prefills), 0)
    for _, group in groupby(prefills, key=lambda prefill: prefill.priority):
        equals = [prefill for prefill in group if seats > 0 or not prefill.needs_seat]
        order, shorter = _order(equals, seats, chunk)
        for place, prefill in enumerate(order):
            tokens = min(prefill.left, chunk, budget)
            if place == 0 and shorter:
                # A token at least: the first in line must not stand still however small the budget is.
                tokens = min(tokens, max(budget - shorter, int(budget * long_share), 1))
            granted[prefill.request_id] = tokens
            budget -= tokens
            seats -= prefill.needs_seat and tokens > 0
    return granted


def _order(equals: list[Prefill], seats: int, chunk: int) -> tuple[list[Prefill], int]:
    """Prompts of one priority in the order in which they take tokens, as far as there are seats; and how many
    tokens those may take that the first in line makes room for."""
    if not equals:
        return [], 0
    first, *others = equals
    shorter = sorted((other for other in others if other.left * SHORTER <= first.left), key=lambda other: other.left)
    order = [first, *shorter, *(other for other in others if other.left * SHORTER > first.left)]
    seated = [prefill for prefill in order if not prefill.needs_seat or (seats := seats - 1) >= 0]
    return seated, sum(min(prefill.left, chunk) for prefill in seated[1:] if prefill.left * SHORTER <= first.left)
