# SPDX-License-Identifier: Apache-2.0
"""Keys and values into their slots."""

import torch

_E4M3_MAX = 448.0
_INT8_MAX = 127.0


def write_rows(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None, k_scale: float = 1.0,
    v_scale: float = 1.0
) -> None:
    """Write ``[tokens, kv_heads, width]`` keys and values, in place.

    Args:
        key, value: bf16.
        keys, values: ``[blocks, block_size, kv_heads, width]``: bf16, int8, or uint8 for e4m3 bytes of ``x / scale``.
        slots: ``[tokens]``, ``block * block_size + offset``; negative for a row that is not kept.
        key_scales, value_scales: ``[blocks, block_size, kv_heads]`` float32, of each int8 row; None for other formats.
        k_scale, v_scale: of all e4m3 rows.

    """
    slots = slots.long()
    kept = slots >= 0
    slots = slots[kept]
    at = slots // keys.shape[1], slots % keys.shape[1]
    for rows, cache, scales, scale in ((key, keys, key_scales, k_scale), (value, values, value_scales, v_scale)):
        rows = rows[kept]
        if scales is not None:
            rows, scales[at] = _int8(rows.float())
        elif cache.dtype == torch.uint8:
            rows = (rows.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        cache[at] = rows.to(cache.dtype)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(numbers, scales)`` of float rows; a row of zeros has the scale one."""
    largest = rows.abs().amax(-1)
    scales = torch.where(largest > 0, largest / _INT8_MAX, 1.0)
    return (rows / scales.unsqueeze(-1)).round().clamp(-_INT8_MAX, _INT8_MAX), scales
