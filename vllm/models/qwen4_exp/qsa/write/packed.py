# SPDX-License-Identifier: Apache-2.0
"""From the packed projection to query, gate and cache: norms of q and k, rotation, gate, and the write, in one launch."""

from typing import NamedTuple

import torch

from .checks import check_write, packed_heads
from .packed_kernel import norm_rope_gate_write_kernel
from .stored import KINDS, scale_arguments


def norm_rope_gate_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    mrope_section: tuple[int, int, int] | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the packed projection to query, gate and cache, in one launch.

    Args:
        qkv: ``[at least tokens, 2 * (q_heads + kv_heads) * head_dim]`` bf16: query and
            gate for every query head, then all keys, then all values.
        positions: ``[>= tokens]``, or ``[3, >= tokens]`` for mrope (time, height, width).
        cos_sin: ``[positions, rotary_dim]`` contiguous, cosines then sines.
        q_weight, k_weight: ``[head_dim]``; the norm multiplies by one plus them.
        eps: of the norms.
        keys, values, key_scales, value_scales, slots, k_scale, v_scale: as for
            ``write_rows``.
        mrope_section: pairs that turn with time, height and width, interleaved; needed
            where positions have three axes.

    Returns ``(query, gate)``, both ``[tokens, q_heads, head_dim]`` bf16: the query is
    normed and rotated, the gate has not been through its sigmoid.

    Rotation is neox style over the first ``rotary_dim`` numbers of a head.  Raises
    ValueError where shapes or dtypes do not fit, as ``write_rows`` does.

    """
    query, gate, launch = packed_launch(
        qkv, positions, cos_sin, q_weight, k_weight, eps, keys, values, slots, mrope_section, key_scales, value_scales,
        k_scale, v_scale,
    )  # fmt: skip
    if launch.programs:
        norm_rope_gate_write_kernel[(launch.programs,)](*launch.arguments(0), **launch.constants, num_warps=1)
    return query, gate


class PackedLaunch(NamedTuple):
    """Of ``norm_rope_gate_write_kernel``: programs, and arguments around ``first_program``."""

    programs: int
    before: tuple
    after: tuple
    constants: dict[str, int]

    def arguments(self, first_program: int) -> tuple:
        return *self.before, first_program, *self.after


def packed_launch(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    eps: float, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
    mrope_section: tuple[int, int, int] | None, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None,
    k_scale: float, v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, PackedLaunch]:  # fmt: skip
    """Query and gate as ``norm_rope_gate_write`` returns them, not yet written, and the launch that writes them."""
    check_write(keys, values, key_scales, value_scales, slots)
    q_heads = packed_heads(qkv, positions, cos_sin, keys, slots, mrope_section)
    tokens, kv_heads, head_dim = slots.shape[0], *keys.shape[2:]
    query = qkv.new_empty(tokens, q_heads, head_dim)
    gate = torch.empty_like(query)
    three_axes = positions.ndim == 2
    _, height, width = mrope_section or (0, 0, 0)
    k_scales, k_strides = scale_arguments(key_scales, keys)
    v_scales, v_strides = scale_arguments(value_scales, values)
    before = (
        qkv, positions, cos_sin, q_weight, k_weight, eps, query, gate, keys, values, k_scales, v_scales, slots, k_scale,
        v_scale,
    )  # fmt: skip
    after = (
        qkv.stride(0), positions.stride(0) if three_axes else 0, positions.stride(-1), *keys.stride()[:3],
        *values.stride()[:3], *k_strides, *v_strides,
    )  # fmt: skip
    constants = {
        "BLOCK_SIZE": keys.shape[1], "D": head_dim, "ROTARY": cos_sin.shape[1], "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads, "AXES": 3 if three_axes else 1, "SECTION_H": height, "SECTION_W": width,
        "KIND": KINDS[keys.dtype],
    }  # fmt: skip
    return query, gate, PackedLaunch(tokens * (q_heads + 2 * kv_heads), before, after, constants)
