# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are ready, into their slots: both of a token and head by one program."""

import torch

from vllm.triton_utils import tl, triton

from .checks import check_write
from .stored import KINDS, scale_arguments, store_in_slot


@triton.jit
def _write_rows_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    k_scale,
    v_scale,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_keys_block,
    stride_keys_slot,
    stride_keys_head,
    stride_values_block,
    stride_values_slot,
    stride_values_head,
    stride_kscale_block,
    stride_kscale_slot,
    stride_kscale_head,
    stride_vscale_block,
    stride_vscale_slot,
    stride_vscale_head,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, triton.next_power_of_2(D))
    mask = dims < D
    k = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dims, mask=mask, other=0.0)
    store_in_slot(
        k, slot, head, keys_ptr, stride_keys_block, stride_keys_slot, stride_keys_head, key_scales_ptr,
        stride_kscale_block, stride_kscale_slot, stride_kscale_head, k_scale, dims, mask, BLOCK_SIZE, KIND,
    )  # fmt: skip
    v = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dims, mask=mask, other=0.0)
    store_in_slot(
        v, slot, head, values_ptr, stride_values_block, stride_values_slot, stride_values_head, value_scales_ptr,
        stride_vscale_block, stride_vscale_slot, stride_vscale_head, v_scale, dims, mask, BLOCK_SIZE, KIND,
    )  # fmt: skip


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
    """Write each token's key and value into its slot, quantized as ``keys`` keeps them.

    Args:
        key, value: ``[at least tokens, kv_heads, head_dim]`` bf16; rows beyond
            ``slots`` are padding and stay unread.
        keys, values, key_scales, value_scales: ``formats.views`` of the layer's cache.
        slots: ``[tokens]``, block times block size plus offset; a negative one is a
            token that is not kept.
        k_scale, v_scale: of an fp8 cache, what stored numbers are multiplied by when
            read.

    Raises ValueError where shapes, dtypes or scales do not fit each other.

    """
    check_write(keys, values, key_scales, value_scales, slots)
    tokens, kv_heads, head_dim = slots.shape[0], *keys.shape[2:]
    if key.shape[0] < tokens or key.shape[1:] != keys.shape[2:] or value.shape != key.shape:
        raise ValueError(
            f"keys {tuple(key.shape)} and values {tuple(value.shape)} for {tokens} slots of {kv_heads} x {head_dim}"
        )
    if not tokens:
        return
    k_scales, k_strides = scale_arguments(key_scales, keys)
    v_scales, v_strides = scale_arguments(value_scales, values)
    _write_rows_kernel[(tokens, kv_heads)](
        key,
        value,
        keys,
        values,
        k_scales,
        v_scales,
        slots,
        k_scale,
        v_scale,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *k_strides,
        *v_strides,
        BLOCK_SIZE=keys.shape[1],
        D=head_dim,
        KIND=KINDS[keys.dtype],
        num_warps=1,
    )
