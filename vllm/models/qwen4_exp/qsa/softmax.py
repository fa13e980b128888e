# SPDX-License-Identifier: Apache-2.0
"""The running softmax: a state, more columns added to it, two states joined, the end.

A state of some columns of one row is ``sums``, the sums of ``p * value`` in four planes
of dimensions (``operands.py``), ``maximum``, the largest score, and ``normaliser``, the
sum of ``p``, with ``p = 2^(score - maximum)``.  Scores carry a factor of log2(e),
because the hardware has ``2^x``.
"""

from vllm.triton_utils import tl, triton

from . import state
from .operands import load_rows, power_below, unscale

NOTHING = tl.constexpr(state.NOTHING)


@triton.jit
def no_columns(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state of no columns at all."""
    zeros = tl.zeros((ROWS, DIM // 4), tl.float32)
    return (zeros, zeros, zeros, zeros), tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def first_unit(FORM: tl.constexpr):
    """What sums have to be multiplied with, before ``add_columns``."""
    if FORM == "int8":
        return tl.full((), 2.0**-100, tl.float32)
    else:
        return tl.full((), unscale(FORM), tl.float32)


@triton.jit
def times(planes, factor):
    """Every plane, multiplied."""
    return planes[0] * factor, planes[1] * factor, planes[2] * factor, planes[3] * factor


@triton.jit
def add_columns(
    sums, maximum, normaliser, unit, q, score_scale, selected, first, end, table, table_width, num_blocks, keys, values,
    key_scales, value_scales, kv_head,
    FORM: tl.constexpr, LAYOUT: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The state and its unit, with ``BLOCK_N`` columns from ``first`` on, before ``end``.

    Args:
        score_scale: ``[rows]``; by which products of queries and stored keys become scores.
        selected: the row's list of tokens.
        table: the request's blocks.
        LAYOUT: a ``launch.Layout``.  Strides are compile-time constants: from them the
            compiler knows how many bytes it may load at once.  A multiple of 16, all
            that it is told about variables, is not what rows of 520 bytes have.

    """
    columns = first + tl.arange(0, BLOCK_N)
    token = tl.load(selected + columns, mask=columns < end, other=-1)
    page = tl.maximum(token, 0) // LAYOUT.block_size
    place = tl.maximum(token, 0) % LAYOUT.block_size
    valid = (token >= 0) & (page < table_width)
    block = tl.load(table + page, mask=valid, other=-1)
    # Blocks that are not there, and entries past the end, are never read: what lies in
    # an unused page may be NaN, and zero times NaN is NaN.
    valid = valid & (block >= 0) & (block < num_blocks)
    block = tl.maximum(block, 0).to(tl.int64)
    at = block * LAYOUT.key_block + (place * LAYOUT.key_token + kv_head * LAYOUT.key_head + LAYOUT.key_shift)
    k = load_rows(keys, at, valid, FORM, DIM)
    at = block * LAYOUT.value_block + (place * LAYOUT.value_token + kv_head * LAYOUT.value_head + LAYOUT.value_shift)
    v = load_rows(values, at, valid, FORM, DIM)

    scores = tl.dot(q[0], tl.trans(k[0]))
    scores = tl.dot(q[1], tl.trans(k[1]), acc=scores)
    scores = tl.dot(q[2], tl.trans(k[2]), acc=scores)
    scores = tl.dot(q[3], tl.trans(k[3]), acc=scores) * (score_scale * unscale(FORM))[:, None]
    if FORM == "int8":
        at = block * LAYOUT.scale_block + (place * LAYOUT.scale_token + kv_head * LAYOUT.scale_head)
        scores = scores * tl.load(key_scales + at, mask=valid, other=0.0)[None, :]
        value_scale = tl.load(value_scales + at, mask=valid, other=0.0)
    scores = tl.where(valid[None, :], scores, NOTHING)
    raised = tl.maximum(maximum, tl.max(scores, axis=1))
    fade = tl.math.exp2(maximum - raised)
    p = tl.where(valid[None, :], tl.math.exp2(scores - raised[:, None]), 0.0)
    normaliser = tl.math.fma(normaliser, fade, tl.sum(p, axis=1))
    if FORM == "int8":
        # A value's scale goes to its probability. Over a power of two that no scale so
        # far exceeds twice, the product fits fp16 at fp16's full precision.
        grown, inverse = power_below(tl.maximum(unit, tl.max(value_scale, axis=0)))
        p = p * (value_scale * inverse)[None, :]
        fade = fade * (unit * inverse)
        unit = grown
    p = p.to(v[0].dtype)
    sums = times(sums, fade[:, None])
    sums = (
        tl.dot(p, v[0], acc=sums[0]),
        tl.dot(p, v[1], acc=sums[1]),
        tl.dot(p, v[2], acc=sums[2]),
        tl.dot(p, v[3], acc=sums[3]),
    )
    return sums, raised, normaliser, unit


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
        tl.math.fma(sums[2], fade, more[2]),
        tl.math.fma(sums[3], fade, more[3]),
    )
    return sums, raised, normaliser


@triton.jit
def finish(sums, normaliser, value_scale, gate, OUT: tl.constexpr):
    """All planes normalised, rounded where the published model rounds, and gated.

    A row without columns is zero; one whose normaliser is NaN stays NaN.
    """
    share = tl.where(normaliser != 0, value_scale / normaliser, 0.0)[:, None]
    return (
        _gated(sums[0] * share, gate[0], OUT),
        _gated(sums[1] * share, gate[1], OUT),
        _gated(sums[2] * share, gate[2], OUT),
        _gated(sums[3] * share, gate[3], OUT),
    )


@triton.jit
def _gated(mixed, gate, OUT: tl.constexpr):
    return (mixed.to(OUT).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))).to(OUT)
