# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: four residual streams, mixed into one block input and back.

With ``C`` streams of width ``H`` a token's state is one row of ``C * H`` values,
stream after stream.  Around every attention and every MLP the model does

    x      = norm(state)                       each stream on its own
    low    = silu(down(x) / C)                 rank ``hc_lowrank``
    input  = mean_c sigmoid(up(low))_c * x_c   what the block sees
    state += 2 * sigmoid(inject(x) / C) * block(input)

Sums are taken in float32 and rounded once to the input's dtype, as the kernels do.
"""

import torch


def _streams(x: torch.Tensor, count: int) -> torch.Tensor:
    """View ``[tokens, count * width]`` as ``[tokens, count, width]``."""
    return x.unflatten(-1, (count, -1))


def grouped_gemma_rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int
) -> torch.Tensor:
    """RMS-normalise every group of a row and scale it by ``1 + weight``.

    Args:
        x: ``[tokens, num_groups * width]``.
        weight: ``[width]`` shared by the groups, or one value per column.
        eps: added to the mean square.
        num_groups: groups in a row; each has its own mean square.

    Returns a new tensor of ``x``'s shape and dtype.

    """
    grouped = _streams(x.float(), num_groups)
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    affine = 1.0 + weight.float().view(-1, grouped.shape[-1])
    return (grouped * scale * affine).flatten(-2).to(x.dtype)


def hc_silu(x: torch.Tensor, hc_count: int) -> torch.Tensor:
    """``silu(x / hc_count)`` for ``[tokens, rank]``, in ``x``'s dtype."""
    return torch.nn.functional.silu(x.float() / hc_count).to(x.dtype)


def hc_gate_mix(x: torch.Tensor, gate: torch.Tensor, hc_count: int) -> torch.Tensor:
    """Average the streams of ``x`` under ``sigmoid(gate)``.

    Both are ``[tokens, hc_count * width]``; the result is ``[tokens, width]``.
    """
    weighted = _streams(torch.sigmoid(gate.float()) * x.float(), hc_count)
    return weighted.mean(-2).to(x.dtype)


def hc_combine(
    residual: torch.Tensor, block_output: torch.Tensor, injection_logits: torch.Tensor | None,
    hc_count: int
) -> torch.Tensor:
    """Add a block's output to every stream, each with its own strength.

    Args:
        residual: ``[tokens, hc_count * width]``; not changed.
        block_output: ``[tokens, width]``.
        injection_logits: ``[tokens, hc_count]``, or None for strength one.
        hc_count: number of streams.

    Returns the new state, of ``residual``'s shape and dtype.

    """
    added = block_output.float().unsqueeze(-2)
    if injection_logits is not None:
        strength = 2.0 * torch.sigmoid(injection_logits.float() / hc_count)
        added = added * strength.unsqueeze(-1)
    return (_streams(residual.float(), hc_count) + added).flatten(-2).to(residual.dtype)


def hc_combine_norm(
    residual: torch.Tensor, block_output: torch.Tensor, injection_logits: torch.Tensor | None,
    norm_weight: torch.Tensor, eps: float, hc_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hc_combine``, then the norm of its (rounded) result; both are returned."""
    state = hc_combine(residual, block_output, injection_logits, hc_count)
    return state, grouped_gemma_rmsnorm(state, norm_weight, eps, hc_count)
