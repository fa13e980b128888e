# SPDX-License-Identifier: Apache-2.0
"""The running softmax: a state, more columns added to it, two states joined, the end.

A state of some columns of one row is ``sums``, the sums of ``p * value`` in two planes
of dimensions (``operands.py``), ``maximum``, and ``normaliser``, the sum of ``p``, with
``p = 2^(score - maximum)``.  Scores carry a factor of log2(e), because the hardware has
``2^x``.

``maximum`` is an integer, so that changing it multiplies by powers of two: nothing is
rounded by that, and it does not matter when it is done.  It is the largest score, rounded
up, so that ``p`` is one at most.  Of int8 rows, whose ``p`` is multiplied by a scale of
the value's own, it is the largest sum of a score and its scale's exponent: then that
product is below two and fits fp16, whatever the scales are.
"""

from vllm.triton_utils import tl, triton

from . import state
from .e4m3 import infinite_to_nan
from .operands import exponent_of, load_keys, load_scales, load_values, offset_of, products, unscale
from .places import row_at

NOTHING = tl.constexpr(state.NOTHING)
# Columns of the smallest product.
ALIKE = tl.constexpr(8)


@triton.jit
def power_of_two(x):
    """``2^x`` of integers ``x <= 0`` in fp32, exactly, as bits; 0 below -126, of -infinity and of NaN."""
    # Beside 1.5 * 2^23, fp32's last place is one: the lower bits are the integer, here an exponent's 127 + x.
    biased = tl.maximum(x, -127.0) + (12582912.0 + 127.0)
    return (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def no_columns(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state of no columns at all."""
    zeros = tl.zeros((ROWS, DIM // 2), tl.float32)
    return (zeros, zeros), tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def no_tiles(ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """``no_columns``, as tiles are added to it: see ``add_columns``."""
    sums, maximum, _ = no_columns(ROWS, DIM)
    return sums, maximum, tl.zeros((ROWS, BLOCK_N), tl.float32), tl.zeros((ROWS, ALIKE), tl.float32)


@triton.jit
def settled(sums, each, factors, weight, FORM: tl.constexpr):
    """``sums`` and ``normaliser`` of the state of all tiles, times ``weight``, a power of two: bits do not depend on it."""
    by, factors = weight * unscale(FORM), tl.max(factors, axis=1)
    if FORM == "int8":
        less = tl.broadcast_to((offset_of(factors) * by)[:, None], sums[0].shape)
        by = tl.broadcast_to(by[:, None], sums[0].shape)
        return (tl.math.fma(sums[0], by, less), tl.math.fma(sums[1], by, less)), tl.sum(each, axis=1) * weight
    else:
        return (sums[0] * by[:, None], sums[1] * by[:, None]), factors * weight


@triton.jit
def add_columns(
    sums, maximum, each, factors, q, score_scale, place, keys, values, key_scales, value_scales, kv_head,
    FORM: tl.constexpr, LAYOUT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The state of some tiles, with the columns that lie at ``place`` (``places.py``).

    Warps wait for each other in every sum over columns.  So the sum of ``factors``, those
    that values were multiplied with, is a product with ones, ``ALIKE`` times the same
    number.  It is the normaliser, rounded as the sums are.  Not of int8 rows, whose
    factors have scales in them: there ``p`` is summed for every column of a tile apart, in
    ``each``, and over columns in the end.

    Args:
        q: of ``as_operands``.
        score_scale: ``[rows]``; by which ``products`` of queries and stored keys become scores.
        LAYOUT: a ``launch.Layout``.  Strides are compile-time constants: from them the
            compiler knows how many bytes it may load at once.  A multiple of 16, all
            that it is told about variables, is not what tokens of 260 words have.

    """
    # What is not there is never read: an unused page may hold NaN, and zero times NaN is NaN.
    valid = place >= 0
    if LAYOUT.within_bits:  # heads may be as far apart as anything
        kv_head = kv_head.to(tl.int64)
    at = row_at(place, LAYOUT)
    k = load_keys(keys + kv_head * LAYOUT.key_head + LAYOUT.key_shift, at, valid, FORM, DIM)
    v = load_values(values + kv_head * LAYOUT.value_head + LAYOUT.value_shift, at, valid, FORM, DIM)

    scores = products(q, k, FORM)
    scaled = tl.broadcast_to(score_scale[:, None], scores.shape)
    if FORM == "int8":
        key_scale, value_scale = load_scales(key_scales, value_scales, at + kv_head * LAYOUT.scale_head, valid, LAYOUT)
        scores = scores * key_scale[None, :]
    elif FORM == "fp8":
        scores = infinite_to_nan(scores)
    scores = tl.where(valid[None, :], scores, -float("inf"))
    if FORM == "int8":
        size = tl.broadcast_to(exponent_of(value_scale)[None, :], scores.shape)
        largest = tl.max(tl.math.fma(scores, scaled, size), axis=1)
    else:
        largest = tl.max(scores, axis=1) * score_scale
    raised = tl.maximum(maximum, tl.ceil(largest))
    fade = power_of_two(maximum - raised)[:, None]
    # Scaled here, where it costs nothing.
    p = tl.math.exp2(tl.math.fma(scores, scaled, tl.broadcast_to(-raised[:, None], scores.shape)))
    if FORM == "int8":
        each = tl.math.fma(each, tl.broadcast_to(fade, each.shape), p)
        p = p * value_scale[None, :]
    p = p.to(v[0].dtype)
    factors = tl.dot(p, tl.full((p.shape[1], ALIKE), 1.0, p.dtype), acc=factors * fade)
    return (tl.dot(p, v[0], acc=sums[0] * fade), tl.dot(p, v[1], acc=sums[1] * fade)), raised, each, factors


@triton.jit
def join(sums, maximum, normaliser, more, more_maximum, each, factors, FORM: tl.constexpr):
    """A state, and one of tiles over other columns, as one state over both."""
    raised = tl.maximum(maximum, more_maximum)
    fade, weight = power_of_two(maximum - raised), power_of_two(more_maximum - raised)
    more, more_normaliser = settled(more, each, factors, weight, FORM)
    normaliser = tl.math.fma(normaliser, fade, more_normaliser)
    fade = tl.broadcast_to(fade[:, None], sums[0].shape)
    return (tl.math.fma(sums[0], fade, more[0]), tl.math.fma(sums[1], fade, more[1])), raised, normaliser


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
    """Sums normalised to the result; infinity, which is a NaN of e4m3 somewhere, becomes NaN."""
    mixed = infinite_to_nan(mixed)
    return (mixed.to(OUT).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))).to(OUT)
