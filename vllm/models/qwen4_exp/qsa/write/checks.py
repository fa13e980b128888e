# SPDX-License-Identifier: Apache-2.0
"""What the writers refuse: views, slots and projections that do not fit each other."""

import torch

from ..formats import BF16, FP8, INT8


def check_write(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Raise ValueError unless these are the views of one cache and slots into it."""
    form = next((f for f in (BF16, FP8, INT8) if f.dtype == keys.dtype), None)
    if form is None or values.dtype != keys.dtype or values.shape != keys.shape or keys.ndim != 4:
        raise ValueError(
            "keys and values are [blocks, block_size, kv_heads, head_dim] of bfloat16, uint8 (e4m3) or int8; got "
            f"{tuple(keys.shape)} of {keys.dtype} and {tuple(values.shape)} of {values.dtype}"
        )
    for scales in (key_scales, value_scales):
        if (scales is not None) != form.scaled_rows:
            raise ValueError(f"rows of a {form.name} cache have {'a scale' if form.scaled_rows else 'no scales'}")
        if scales is not None and (scales.shape != keys.shape[:3] or scales.dtype != torch.float32):
            raise ValueError(f"scales are {tuple(keys.shape[:3])} fp32, got {tuple(scales.shape)} of {scales.dtype}")
    if slots.ndim != 1:
        raise ValueError(f"slots are [tokens], got {tuple(slots.shape)}")


def packed_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    mrope_section: tuple[int, int, int] | None,
) -> int:
    """Query heads of a packed projection; ValueError where something does not fit."""
    kv_heads, head_dim = keys.shape[2:]
    tokens, rotary = slots.shape[0], cos_sin.shape[1]
    heads, rest = divmod(qkv.shape[1], 2 * head_dim)
    if rest or heads <= kv_heads or qkv.shape[0] < tokens or qkv.stride(1) != 1:
        raise ValueError(
            f"a packed projection is [>= {tokens}, 2 * (q_heads + {kv_heads}) * {head_dim}] with rows that lie "
            f"together, got {tuple(qkv.shape)}, strides {qkv.stride()}"
        )
    if rotary % 2 or rotary > head_dim or not cos_sin.is_contiguous():
        raise ValueError(f"{rotary} rotated of {head_dim} numbers in a table of strides {cos_sin.stride()}")
    if positions.shape[-1] < tokens or positions.shape[:-1] not in ((), (3,)):
        raise ValueError(f"positions are [>= {tokens}] or [3, >= {tokens}], got {tuple(positions.shape)}")
    if positions.ndim == 2 and (mrope_section is None or sum(mrope_section) != rotary // 2):
        raise ValueError(f"positions of three axes share {rotary // 2} pairs, mrope_section is {mrope_section}")
    return heads - kv_heads
