# SPDX-License-Identifier: Apache-2.0
"""Softmax attention that is given its rows in parts.

For scores ``x`` of the rows seen so far, three values a token and head are kept: the largest
score ``m``, the sum ``n`` of ``exp(x - m)``, and the sum ``a`` of ``exp(x - m) * value``. A
further part with its own largest score ``m'`` scales both sums by ``exp(m - max(m, m'))`` and
adds its own. The result is ``a / n``, the same whatever the parts. Keeping one set and not
one for each part is what makes memory independent of how many there are.
"""

from typing import NamedTuple

import torch

# Tokens that are finished together, which bounds what that takes beside its result.
_TOKENS = 256


class Running(NamedTuple):
    """``total`` is ``[rows, heads, width]``, ``largest`` and ``norm`` are ``[rows, heads]``; all float32."""

    total: torch.Tensor
    largest: torch.Tensor
    norm: torch.Tensor


def start(q: torch.Tensor) -> Running:
    """Of no rows yet, for queries ``[rows, heads, width]``."""
    rows, heads, _ = q.shape
    return Running(
        torch.zeros(q.shape, dtype=torch.float32, device=q.device),
        torch.full((rows, heads), -torch.inf, device=q.device),
        torch.zeros(rows, heads, device=q.device),
    )


def fold(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    running: Running,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Add one part's rows to ``running``, in place.

    Args:
        q: ``[rows, heads, width]``.
        keys, values: ``[part, kv_heads, width]``, floats or int8.
        chosen: ``[rows, selected + 1]`` int32 rows of the part, packed to the left; the last column counts them.
        running: of the parts before.
        key_scales, value_scales: ``[part, kv_heads]`` of int8 rows.
        k_scale, v_scale: of all rows.

    """
    counts = chosen[:, -1]
    most = int(counts.max()) if chosen.shape[0] else 0
    if not most:
        return
    valid = torch.arange(most, device=q.device) < counts.unsqueeze(-1)
    rows = torch.where(valid, chosen[:, :most].long(), 0)
    # [rows, kv_heads, selected, width]
    k = keys[rows].float().transpose(1, 2) * k_scale
    v = values[rows].float().transpose(1, 2) * v_scale
    if key_scales is not None:
        k = k * key_scales[rows].transpose(1, 2).unsqueeze(-1)
    if value_scales is not None:
        v = v * value_scales[rows].transpose(1, 2).unsqueeze(-1)
    scores = q.float().unflatten(1, (k.shape[1], -1)) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf).flatten(1, 2)
    largest = torch.maximum(running.largest, scores.amax(-1))
    # A token without any row has no largest score, and -inf minus itself is no number.
    finite = torch.where(largest == -torch.inf, 0.0, largest)
    before = (running.largest - finite).exp()
    weights = (scores - finite.unsqueeze(-1)).exp()
    # Rows of the part that no token reads may hold anything, NaN among it.
    v = v.masked_fill(~valid[:, None, :, None], 0.0)
    mixed = (weights.unflatten(1, (v.shape[1], -1)) @ v).flatten(1, 2)
    running.total.mul_(before.unsqueeze(-1)).add_(mixed)
    running.norm.mul_(before).add_(weights.sum(-1))
    running.largest.copy_(largest)


def finish(running: Running, output_gate: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Divide, gate and round into ``out`` ``[rows, heads, width]``; tokens without a row become zero.

    Args:
        running: of all parts.
        output_gate: values for every output, before the sigmoid.
        out: overwritten and returned.

    """
    for begin in range(0, out.shape[0], _TOKENS):
        some = slice(begin, begin + _TOKENS)
        mixed = running.total[some] / running.norm[some].clamp_min(1e-20).unsqueeze(-1)
        gate = torch.sigmoid(output_gate[some].reshape(mixed.shape).float())
        # The published model rounds before it gates.
        out[some] = mixed.to(out.dtype).float() * gate
    return out
