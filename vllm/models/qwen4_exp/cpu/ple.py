# SPDX-License-Identifier: Apache-2.0
"""N-gram embeddings (PLE): the gate, and the dilated short convolution after it.

For each residual stream ``s`` the looked-up embedding gives a key ``k_s`` and one
shared value ``v``.  The stream's own state is the query, and

    d_s   = <norm(k_s), norm(state_s)> / sqrt(H)
    g_s   = sigmoid(sign(d_s) * sqrt(max(|d_s|, 1e-6)))
    out_s = g_s * v

A causal depthwise convolution over ``norm(out)`` is then added to ``out``.  Its
taps are ``dilation`` tokens apart, so a request carries ``(K - 1) * dilation``
past inputs from one step to the next: that window is its state.
"""

import math
from typing import Literal

import torch

from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from .hyperconnection import grouped_gemma_rmsnorm

Mode = Literal["decode", "spec", "prefill"]


def ple_gate(
    key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, norm_key_w: torch.Tensor,
    norm_query_w: torch.Tensor, norm_conv_w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate the value by how well key and state agree.

    Args:
        key: ``[tokens, C * H]``.
        value: ``[tokens, H]``.
        hidden: ``[tokens, C * H]``, the residual streams.
        norm_key_w, norm_query_w, norm_conv_w: ``[C * H]``, offsets from one.
        eps: of the three norms.

    Returns ``(gated, normed)``, both ``[tokens, C * H]`` in ``hidden``'s dtype:
    the gated value per stream and its norm, the convolution's input.

    """
    width = value.shape[-1]
    count = hidden.shape[-1] // width
    normed_key = grouped_gemma_rmsnorm(key, norm_key_w, eps, count)
    normed_query = grouped_gemma_rmsnorm(hidden, norm_query_w, eps, count)
    # Products, sum and gate are each rounded to the activation dtype: the
    # published model was trained with those roundings.
    dot = (normed_key * normed_query).unflatten(-1, (count, width)).sum(-1)
    dot = dot / math.sqrt(width)
    magnitude = dot.abs().clamp_min(1e-6).sqrt()
    gate = torch.sigmoid(dot.sign() * magnitude)
    gated = (gate.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-2)
    return gated, grouped_gemma_rmsnorm(gated, norm_conv_w, eps, count)


def _convolve(window: torch.Tensor, weights: torch.Tensor, dilation: int):
    """Slide the dilated taps over ``[rows, C, T]``: ``silu`` of ``[rows, C, T']``."""
    conv = torch.nn.functional.conv1d(
        window.float(),
        weights.float().unsqueeze(1),
        groups=weights.shape[0],
        dilation=dilation,
    )
    return torch.nn.functional.silu(conv.to(window.dtype).float()).to(window.dtype)


def _check(conv_state: torch.Tensor, channels: int, window: int) -> None:
    if conv_state.shape[1] != channels or conv_state.shape[2] < window:
        raise ValueError(
            "conv_state must be [slots, channels, window] with "
            f"channels = {channels} and window >= {window}, "
            f"got {tuple(conv_state.shape)}"
        )


def _decode(x, conv_state, weights, slots, has_initial, dilation):
    """One token per request: every row is a request, its state moves on by one."""
    length = (weights.shape[1] - 1) * dilation
    live = slots != NULL_BLOCK_ID
    history = conv_state[slots][..., :length]
    read = live if has_initial is None else live & has_initial.bool()
    history = torch.where(read.view(-1, 1, 1), history, 0.0)
    window = torch.cat((history, x.unsqueeze(-1)), dim=-1)
    result = _convolve(window, weights, dilation)[..., 0]
    conv_state[slots[live], :, :length] = window[live, :, 1:]
    return torch.where(live.unsqueeze(-1), result, 0.0)


def _chunks(
    x, conv_state, weights, slots, starts, has_initial, accepted, query_len, dilation
):
    """Several tokens per request; ``accepted`` is None for a prefill chunk.

    A verified draft step kept ``query_len - 1`` more inputs than the taps reach
    back.  It starts reading after the last accepted one and leaves its own
    inputs behind for the next step's rollback.
    """
    length = (weights.shape[1] - 1) * dilation
    result = torch.zeros_like(x)
    for row, slot in enumerate(slots.tolist()):
        begin, end = int(starts[row]), int(starts[row + 1])
        live = slot != NULL_BLOCK_ID
        if end <= begin or (accepted is None and not live):
            continue
        offset = 0
        if accepted is not None:
            offset = min(max(int(accepted[row]) - 1, 0), query_len - 1)
        fresh = not live or (has_initial is not None and not has_initial[row])
        past = conv_state[slot, :, offset : offset + length]
        past = torch.zeros_like(past) if fresh else past
        window = torch.cat((past, x[begin:end].T), dim=-1)
        result[begin:end] = _convolve(window[None], weights, dilation)[0].T
        if not live:
            continue
        if accepted is None:
            conv_state[slot, :, :length] = window[:, end - begin :]
        else:
            keep = min(length + end - begin, length + query_len) - 1
            conv_state[slot, :, :keep] = window[:, 1 : keep + 1]
    return result


def ple_conv(
    inputs: torch.Tensor, residual: torch.Tensor, conv_state: torch.Tensor,
    conv_weights: torch.Tensor, state_indices: torch.Tensor, outer_residual: torch.Tensor | None, *,
    mode: Mode, dilation: int, query_start_loc: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None, has_initial_states: torch.Tensor | None = None,
    spec_query_len: int = 1, token_indices: torch.Tensor | None = None
) -> None:
    """Convolve, write the result into ``residual`` and move the state on, in place.

    Args:
        inputs: ``[tokens, channels]``.
        residual: ``[tokens, channels]``, overwritten.  With ``outer_residual`` it
            becomes ``outer_residual + (residual + conv)``, else ``conv`` alone.
        conv_state: ``[slots, channels, window]``, updated; may be strided.
        conv_weights: ``[channels, K]``, oldest tap first.
        state_indices: ``[requests]``; the null block marks an inactive row.
        outer_residual: None or ``[tokens, channels]``.
        mode: one token a request, a draft to verify, or a prefill chunk.
        dilation: tokens between two taps.
        query_start_loc: ``[requests + 1]``; needed unless decoding.
        num_accepted_tokens: ``[requests]``; needed in ``spec``.
        has_initial_states: ``[requests]``; False where a request has no past.
        spec_query_len: largest number of tokens a ``spec`` request brings.
        token_indices: rows of the batch that belong to this call, in order.

    Raises ValueError for a missing argument or a state that is too small.

    """
    if mode not in ("decode", "spec", "prefill"):
        raise ValueError(f"unknown short-convolution mode {mode!r}")
    spec_len = spec_query_len if mode == "spec" else 1
    _check(
        conv_state,
        inputs.shape[1],
        (conv_weights.shape[1] - 1) * dilation + spec_len - 1,
    )
    x = inputs if token_indices is None else inputs[token_indices]
    slots = state_indices.long()
    if mode == "decode":
        conv = _decode(
            x,
            conv_state,
            conv_weights,
            slots[: x.shape[0]],
            None if has_initial_states is None else has_initial_states[: x.shape[0]],
            dilation,
        )
    else:
        history = has_initial_states if mode == "prefill" else num_accepted_tokens
        if query_start_loc is None or history is None:
            raise ValueError(f"{mode} needs query_start_loc and the state of its past")
        conv = _chunks(
            x,
            conv_state,
            conv_weights,
            slots,
            query_start_loc,
            has_initial_states if mode == "prefill" else None,
            num_accepted_tokens if mode == "spec" else None,
            spec_len,
            dilation,
        )
    rows = slice(None) if token_indices is None else token_indices
    if outer_residual is not None:
        conv = outer_residual[rows] + (residual[rows] + conv)
    residual[rows] = conv
