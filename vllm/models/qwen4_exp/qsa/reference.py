# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch: what the CPU runs, what kernels are tested against.

Same signatures as ``attention.py`` and ``sections.py``; every sum in float32.
"""

import math

import torch

from .e4m3 import decode_reference
from .state import NOTHING, State

# Gathered K and V of one pass, in float32: bounds the memory of a long prefill.
_PASS_BYTES = 64 << 20


def _numbers(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows ``[..., dim]`` as float32 numbers, scaled if they have scales ``[...]``."""
    numbers = decode_reference(stored) if stored.dtype == torch.uint8 else stored.float()
    return numbers if scales is None else numbers * scales.unsqueeze(-1)


def add_columns(
    state: State, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor,
    valid: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, *,
    key_scales: torch.Tensor | None, value_scales: torch.Tensor | None, k_scale: float,
) -> State:  # fmt: skip
    """``state`` with the columns ``tokens`` (``[rows, n]``), where ``valid``, added.

    The rest as in ``sparse_paged_attention``.
    """
    blocks, block_size, kv_heads = keys.shape[:3]
    page = tokens.clamp(min=0).long() // block_size
    known = (token_to_req >= 0) & (token_to_req < block_table.shape[0])
    valid = valid & (tokens >= 0) & (page < block_table.shape[1]) & known.unsqueeze(-1)
    request = torch.where(known, token_to_req, 0).long().unsqueeze(-1)
    block = block_table[request, page.clamp(max=block_table.shape[1] - 1)].long()
    valid = valid & (block >= 0) & (block < blocks)
    at = torch.where(valid, block, 0), torch.where(valid, tokens.long() % block_size, 0)
    taken = [None if scales is None else scales[at] for scales in (key_scales, value_scales)]
    # [rows, kv_heads, n, dim]; rows that are not there may hold NaN, and 0 * NaN is NaN.
    k, v = (_numbers(rows[at], scales).transpose(1, 2) for rows, scales in zip((keys, values), taken))
    k, v = (rows.masked_fill(~valid[:, None, :, None], 0.0) for rows in (k, v))

    query = q.float().unflatten(1, (kv_heads, -1))
    scores = query @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 * k_scale * math.log2(math.e))
    scores = scores.masked_fill(~valid[:, None, None], NOTHING)
    accumulator, maximum, normaliser = (part.unflatten(1, (kv_heads, -1)) for part in state)
    raised = torch.maximum(maximum, scores.amax(-1)) if tokens.shape[1] else maximum
    fade = torch.exp2(maximum - raised)
    p = torch.exp2(scores - raised.unsqueeze(-1)).masked_fill(~valid[:, None, None], 0.0)
    normaliser = normaliser * fade + p.sum(-1)
    accumulator = accumulator * fade.unsqueeze(-1) + p @ v
    return State(*(part.flatten(1, 2) for part in (accumulator, raised, normaliser)))


def finish(state: State, out: torch.Tensor, *, output_gate: torch.Tensor, v_scale: float = 1.0) -> torch.Tensor:
    """The gated result of ``state``, into ``out`` and returned; see ``sections.finish``."""
    normaliser = state.normaliser.unsqueeze(-1)
    mixed = torch.where(normaliser != 0, state.accumulator * (v_scale / normaliser), 0.0)
    # The published model rounds before it gates.
    gate = torch.sigmoid(output_gate.reshape(out.shape).float())
    return out.copy_(mixed.to(out.dtype).float() * gate)


def sparse_paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, block_table: torch.Tensor,
    token_to_req: torch.Tensor, out: torch.Tensor, *, output_gate: torch.Tensor,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None, k_scale: float = 1.0,
    v_scale: float = 1.0, prefill: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As ``attention.sparse_paged_attention``; ``prefill`` makes no difference here."""
    del prefill
    rows, heads, dim = q.shape
    counts = selected[:, -1].clamp(max=selected.shape[1] - 1)
    most = max(0, int(counts.max())) if rows else 0
    step = max(1, _PASS_BYTES // (8 * max(1, most) * keys.shape[2] * dim))
    for begin in range(0, rows, step):
        part = slice(begin, min(rows, begin + step))
        valid = torch.arange(most, device=q.device) < counts[part].unsqueeze(-1)
        state = add_columns(
            State.empty(part.stop - begin, heads, dim, q.device), q[part], keys, values, selected[part, :most], valid,
            block_table, token_to_req[part], key_scales=key_scales, value_scales=value_scales, k_scale=k_scale,
        )  # fmt: skip
        finish(state, out[part], output_gate=output_gate[part], v_scale=v_scale)
    return out


def attend_section(
    state: State, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor,
    columns: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, *,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None, k_scale: float = 1.0,
) -> None:  # fmt: skip
    """As ``sections.attend_section``: updates ``state`` in place."""
    ends = torch.minimum(columns[:, 1], selected[:, -1].clamp(max=selected.shape[1] - 1))
    place = torch.arange(selected.shape[1] - 1, device=q.device)
    valid = (place >= columns[:, :1]) & (place < ends.unsqueeze(-1))
    grown = add_columns(
        state, q, keys, values, selected[:, :-1], valid, block_table, token_to_req,
        key_scales=key_scales, value_scales=value_scales, k_scale=k_scale,
    )  # fmt: skip
    for old, new in zip(state, grown):
        old.copy_(new)
