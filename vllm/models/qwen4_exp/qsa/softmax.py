# SPDX-License-Identifier: Apache-2.0
"""The running softmax: a state, more columns added to it, two states joined, the end.

A state of some columns of one row is ``sums``, the sums of ``p * value`` in two planes
of dimensions (``operands.py``), ``maximum``, the largest score, and ``normaliser``, the
sum of ``p``, with ``p = 2^(score - maximum)``.  Scores carry a factor of log2(e),
because the hardware has ``2^x``.
"""

from vllm.triton_utils import tl, triton

from . import state
from .e4m3 import infinite_to_nan
from .operands import load_keys, load_values, offset_of, power_below, products, unscale

NOTHING = tl.constexpr(state.NOTHING)
# Columns of the smallest product.
ALIKE = tl.constexpr(8)


@triton.jit
def no_columns(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state of no columns at all."""
    zeros = tl.zeros((ROWS, DIM // 2), tl.float32)
    return (zeros, zeros), tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def no_tiles(FORM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """``no_columns``, as tiles are added to it: see ``add_columns``."""
    sums, maximum, _ = no_columns(ROWS, DIM)
    each, factors = tl.zeros((ROWS, BLOCK_N), tl.float32), tl.zeros((ROWS, ALIKE), tl.float32)
    return sums, maximum, each, factors, tl.full((ROWS,), 2.0**-100 if FORM == "int8" else 1.0, tl.float32)


@triton.jit
def settled(sums, each, factors, unit, FORM: tl.constexpr):
    """``sums`` and ``normaliser`` of the state of all tiles."""
    normaliser = tl.sum(each, axis=1)
    if FORM == "int8":
        less = offset_of(factors)[:, None]
        sums = sums[0] + less, sums[1] + less
    elif FORM == "fp8":
        sums = infinite_to_nan(sums[0]), infinite_to_nan(sums[1])
    return times(sums, (unit * unscale(FORM))[:, None]), normaliser


@triton.jit
def times(planes, factor):
    """Every plane, multiplied."""
    return planes[0] * factor, planes[1] * factor


@triton.jit
def add_columns(
    sums, maximum, each, factors, unit, q, score_scale, place, keys, values, key_scales, value_scales, kv_head,
    FORM: tl.constexpr, LAYOUT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The state of some tiles, with the columns that lie at ``place`` (``places.py``).

    Warps wait for each other in every sum over columns.  So what is summed up in the end
    stays apart for every column of a tile: ``each``, whose sum is the normaliser.  And the
    sum of ``factors``, those that int8 values were multiplied with, is a product with ones,
    ``ALIKE`` times the same number.  Sums are in ``unit``.

    Args:
        q: of ``as_operands``.
        score_scale: ``[rows]``; by which ``products`` of queries and stored keys become scores.
        LAYOUT: a ``launch.Layout``.  Strides are compile-time constants: from them the
            compiler knows how many bytes it may load at once.  A multiple of 16, all
            that it is told about variables, is not what rows of 520 bytes have.

    """
    # What is not there is never read: an unused page may hold NaN, and zero times NaN is NaN.
    valid = place >= 0
    at = place.to(tl.int64) * LAYOUT.unit
    k = load_keys(keys + kv_head * LAYOUT.key_head + LAYOUT.key_shift, at, valid, FORM, DIM)
    v = load_values(values + kv_head * LAYOUT.value_head + LAYOUT.value_shift, at, valid, FORM, DIM)

    scores, largest_scale = products(q, k, FORM), unit
    if FORM == "int8":
        at += kv_head * LAYOUT.scale_head
        scores = scores * tl.load(key_scales + at, mask=valid, other=0.0)[None, :]
        scores = tl.where(valid[None, :], scores, -float("inf"))
        value_scale = tl.broadcast_to(tl.load(value_scales + at, mask=valid, other=0.0)[None, :], scores.shape)
        # One reduction for both: warps wait for each other once.
        largest, largest_scale = tl.split(tl.max(tl.join(scores, value_scale), axis=1))
    else:
        if FORM == "fp8":
            scores = infinite_to_nan(scores)
        scores = tl.where(valid[None, :], scores, -float("inf"))
        largest = tl.max(scores, axis=1)
    raised = tl.maximum(maximum, largest * score_scale)
    fade = tl.math.exp2(maximum - raised)[:, None]
    # Scaled here, where it costs nothing.
    score_scale = tl.broadcast_to(score_scale[:, None], scores.shape)
    p = tl.math.exp2(tl.math.fma(scores, score_scale, tl.broadcast_to(-raised[:, None], scores.shape)))
    each = tl.math.fma(each, tl.broadcast_to(fade, each.shape), p)
    if FORM == "int8":
        # A value's scale goes to its probability. Over a power of two that no scale so
        # far exceeds twice, the product fits fp16 at fp16's full precision.
        grown, inverse = power_below(tl.maximum(unit, largest_scale))
        p = p * (value_scale * inverse[:, None])
        fade = fade * (unit * inverse)[:, None]
        unit = grown
    p = p.to(v[0].dtype)
    if FORM == "int8":
        # Numbers beside them in the matrix units' tile come for nothing.
        factors = tl.dot(p, tl.full((p.shape[1], ALIKE), 1.0, tl.float16), acc=factors * fade)
    sums = times(sums, fade)
    sums = (
        tl.dot(p, v[0], acc=sums[0]),
        tl.dot(p, v[1], acc=sums[1]),
    )
    return sums, raised, each, factors, unit


@triton.jit
def join(sums, maximum, normaliser, more, more_maximum, more_normaliser):
    """Two states over different columns as one state over both."""
    raised = tl.maximum(maximum, more_maximum)
    fade, weight = tl.math.exp2(maximum - raised), tl.math.exp2(more_maximum - raised)
    normaliser = tl.math.fma(normaliser, fade, more_normaliser * weight)
    more = times(more, weight[:, None])
    fade = tl.broadcast_to(fade[:, None], sums[0].shape)
    sums = (
        tl.math.fma(sums[0], fade, more[0]),
        tl.math.fma(sums[1], fade, more[1]),
    )
    return sums, raised, normaliser


@triton.jit
def finish(sums, normaliser, value_scale, gate, OUT: tl.constexpr):
    """All planes normalised, rounded where the published model rounds, and gated."""
    share = share_of(normaliser, value_scale)[:, None]
    return (
        gated(sums[0] * share, gate[0], OUT),
        gated(sums[1] * share, gate[1], OUT),
    )


@triton.jit
def share_of(normaliser, value_scale):
    """By what sums are multiplied in the end: a row without columns is zero, one whose normaliser is NaN stays NaN."""
    return tl.where(normaliser != 0, value_scale / normaliser, 0.0)


@triton.jit
def gated(mixed, gate, OUT: tl.constexpr):
    return (mixed.to(OUT).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))).to(OUT)
