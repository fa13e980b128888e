# SPDX-License-Identifier: Apache-2.0
"""The best of a list of integers, by one program: what ``select.py`` does twice for every row.

A list is ``[blocks, 8]`` integers in order of position, -1 where there is nothing, held in two tensors, ``left`` the
first four of each block and ``right`` the others: a thread reads four at a time, 16 bytes, and owns whole blocks, so
that numbering what it keeps takes additions of its own and one running sum over blocks.
"""

from vllm.triton_utils import tl, triton

BLOCK = tl.constexpr(8)
# A pivot in the middle every so often bounds the steps where interpolation creeps, as it does towards a pile of ties.
_MIDDLE_EVERY = tl.constexpr(8)


@triton.jit
def count_from(left, right, pivot):
    """How many integers are at least ``pivot``, which is positive or 0."""
    # Sign bits of differences: two instructions an integer, a comparison takes three.
    below = pivot - 1
    return -tl.sum(((below - left) >> 31) + ((below - right) >> 31))


@triton.jit
def least(left, right):
    """The smallest integer that is not -1."""
    unsigned = tl.minimum(left.to(tl.uint32, bitcast=True), right.to(tl.uint32, bitcast=True))
    return tl.min(unsigned).to(tl.int32, bitcast=True)


@triton.jit
def bound(left, right):
    """One above the largest integer."""
    return tl.max(tl.maximum(left, right)) + 1


@triton.jit
def _level(left, right, low, at_low, high, KEEP: tl.constexpr):
    """``low``, ``high``, and the counts from them, such that counting from ``low`` gives ``KEEP`` or ``high`` is next.

    Interpolates between counts ("regula falsi"; the weight of an end that stays is halved, which is known as the
    Illinois method): 8 steps where scores differ, about 30 where most are equal, never more than 31 times 8.  Whatever
    the road, the same integers are kept at its end.
    """
    at_high = 0
    over = (at_low - KEEP).to(tl.float32)
    under = 1.0 * KEEP
    moved = 0
    step = 0
    while (at_low != KEEP) & (high - low > 1):
        step += 1
        part = tl.where(step % _MIDDLE_EVERY == 0, 0.5, over / (over + under))
        pivot = low + ((high - low).to(tl.float32) * part).to(tl.int32)
        pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
        count = count_from(left, right, pivot)
        way = tl.where(count >= KEEP, 1, -1)
        weight = tl.where(way == moved, 0.5, 1.0)
        moved = way
        if count >= KEEP:
            low = pivot
            at_low = count
            over = (count - KEEP).to(tl.float32)
            under *= weight
        else:
            high = pivot
            at_high = count
            under = (KEEP - count).to(tl.float32)
            over *= weight
    return low, at_low, high, at_high


@triton.jit
def _bits(left, right):
    """A block's eight flags as one integer, the first lowest."""
    four = tl.arange(0, 4)[None, :]
    return tl.sum((left.to(tl.int32) << four) + (right.to(tl.int32) << (four + 4)), axis=1)


@triton.jit
def _before(bits):
    """How many bits are set in the blocks before each."""
    ones = bits & 1
    for at in tl.static_range(1, BLOCK):
        ones += (bits >> at) & 1
    return tl.cumsum(ones, axis=0) - ones


@triton.jit
def keep_best(left, right, low, at_low, high, first, out_ptr, KEEP: tl.constexpr):
    """Write the positions of the ``KEEP`` largest integers, ascending, to ``out_ptr``; of equal ones the first win.

    ``low`` and ``high`` bracket the smallest of them: ``at_low``, at least ``KEEP``, count from ``low``, and none from
    ``high``.  ``first`` is the position of each block's first integer.  Returns an integer that they all reach.
    """
    low, at_low, high, at_high = _level(left, right, low, at_low, high, KEEP)
    kept = _bits(left >= low, right >= low)
    if at_low != KEEP:
        # What is level with the last one that fits: as many as there is room for.
        above = _bits(left >= high, right >= high)
        level = kept - above
        rank = _before(level)
        kept = above
        for at in tl.static_range(BLOCK):
            bit = (level >> at) & 1
            rank += bit
            kept += tl.where(rank <= KEEP - at_high, bit, 0) << at
    place = _before(kept)
    for at in tl.static_range(BLOCK):
        bit = (kept >> at) & 1
        tl.store(out_ptr + place, first + at, mask=bit != 0)
        place += bit
    return low
