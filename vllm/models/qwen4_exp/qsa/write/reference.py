# SPDX-License-Identifier: Apache-2.0
"""The writers in plain torch: what they are tested against, and what a CPU runs."""

import torch

from ..e4m3 import encode_reference
from ..formats import INT8
from .checks import check_write, packed_heads

_SMALLEST = 1e-30


def quantized_rows(x: torch.Tensor, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``[..., head_dim]`` as a cache of ``dtype`` keeps it: codes, and one scale a row for int8."""
    if dtype == torch.bfloat16:
        return x.bfloat16(), None
    x = x.float()
    finite = x.abs() < torch.inf
    if dtype == torch.uint8:
        return encode_reference(torch.where(finite, x / torch.full_like(x, scale), torch.nan)), None
    sound = finite.all(-1, keepdim=True)
    x = torch.where(finite, x, 0.0)
    most = x.abs().amax(-1, keepdim=True)
    normal = most >= _SMALLEST
    # Tensors on both sides: torch makes a product with a rounded reciprocal of the rest.
    largest = torch.full_like(most, INT8.largest)
    factor = torch.where(normal & sound, largest / most, 0.0)
    scales = torch.where(normal, most / largest, 0.0)
    codes = (x * factor).round().to(torch.int8)
    return codes, torch.where(sound, scales, torch.nan).squeeze(-1)


def _store(x, slots, rows, scales, scale) -> None:
    kept = slots >= 0
    at = slots[kept] // rows.shape[1], slots[kept] % rows.shape[1]
    codes, row_scales = quantized_rows(x[: slots.shape[0]][kept], rows.dtype, scale)
    rows[at] = codes
    if row_scales is not None:
        scales[at] = row_scales


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """As ``rows.write_rows``."""
    check_write(keys, values, key_scales, value_scales, slots)
    slots = slots.long()
    _store(key, slots, keys, key_scales, k_scale)
    _store(value, slots, values, value_scales, v_scale)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of ``[..., head_dim]`` times one plus ``weight``, in fp32, rounded to bf16."""
    x = x.float()
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (x * inverse * (weight.float() + 1.0)).bfloat16()


def angles(
    positions: torch.Tensor, cos_sin: torch.Tensor, section: tuple[int, int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, ``[tokens, rotary_dim / 2]`` fp32, of one or three position axes."""
    half = cos_sin.shape[1] // 2
    if positions.ndim == 1:
        rows = cos_sin[positions].float()
        return rows[:, :half], rows[:, half:]
    pair = torch.arange(half, device=positions.device)
    axis = torch.zeros_like(pair)
    for number in (1, 2):
        axis[(pair % 3 == number) & (pair < 3 * section[number])] = number
    of_pair = positions[axis].T
    return cos_sin[of_pair, pair].float(), cos_sin[of_pair, half + pair].float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first numbers of ``[tokens, heads, head_dim]``, neox style, rounded to bf16."""
    half = cos.shape[1]
    low, high, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1).bfloat16()


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
    """As ``packed.norm_rope_gate_write``."""
    check_write(keys, values, key_scales, value_scales, slots)
    q_heads = packed_heads(qkv, positions, cos_sin, keys, slots, mrope_section)
    tokens, kv_heads, head_dim = slots.shape[0], *keys.shape[2:]
    widths = (2 * q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    query_gate, key, value = qkv[:tokens].split(widths, -1)
    query, gate = query_gate.view(tokens, q_heads, 2 * head_dim).chunk(2, -1)
    cos, sin = angles(positions[..., :tokens], cos_sin, mrope_section)
    query = rotate(norm(query, q_weight, eps), cos, sin)
    key = rotate(norm(key.view(tokens, kv_heads, head_dim), k_weight, eps), cos, sin)
    write_rows(
        key,
        value.view(tokens, kv_heads, head_dim),
        keys,
        values,
        slots,
        key_scales=key_scales,
        value_scales=value_scales,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return query, gate.contiguous()
