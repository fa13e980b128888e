# SPDX-License-Identifier: Apache-2.0
"""From the packed projection to query, gate and cache: the kernel. ``packed.py`` launches it."""

from vllm.triton_utils import tl, triton

from .stored import store_in_slot


@triton.jit(do_not_specialize=["first_program"])
def norm_rope_gate_write_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_out_ptr,
    gate_out_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    k_scale,
    v_scale,
    first_program,
    stride_qkv,
    stride_pos_axis,
    stride_pos_token,
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
    ROTARY: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    AXES: tl.constexpr,
    SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
    KIND: tl.constexpr,
):
    # A row of qkv: [query, gate] for every query head, then all keys, then all values.
    # Programs before the first have other work: compact_kv/one_launch.py calls this in a kernel of its own.
    HALF: tl.constexpr = ROTARY // 2
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    program = tl.program_id(0) - first_program
    token = (program // HEADS).to(tl.int64)
    head = program % HEADS
    dims = tl.arange(0, triton.next_power_of_2(D))
    mask = dims < D
    row_ptr = qkv_ptr + token * stride_qkv
    if head >= Q_HEADS + KV_HEADS:
        kv_head = (head - Q_HEADS - KV_HEADS).to(tl.int64)
        v = tl.load(row_ptr + (2 * Q_HEADS + KV_HEADS + kv_head) * D + dims, mask=mask, other=0.0)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        tl.debug_barrier()
        if slot >= 0:
            store_in_slot(
                v, slot, kv_head, values_ptr, stride_values_block, stride_values_slot, stride_values_head, value_scales_ptr,
                stride_vscale_block, stride_vscale_slot, stride_vscale_head, v_scale, dims, mask, BLOCK_SIZE, KIND,
            )  # fmt: skip
        return

    is_key = head >= Q_HEADS
    kv_head = (head - Q_HEADS).to(tl.int64)
    if is_key:
        source = row_ptr + (2 * Q_HEADS + kv_head) * D
        weight_ptr = k_weight_ptr
    else:
        source = row_ptr + 2 * head * D
        weight_ptr = q_weight_ptr
    # All loads come first: one after the other they take longer than everything else. One warp has none to wait for, but
    # past a barrier the compiler moves no load.
    x = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32) + 1.0
    # Each rotated number meets the one half a rotation away; it is read once more,
    # from L1, rather than moved between lanes.
    rotated = dims < ROTARY
    low = dims < HALF
    partner = tl.where(low, dims + HALF, dims - HALF)
    other = tl.load(source + partner, mask=rotated, other=0.0).to(tl.float32)
    other_weight = tl.load(weight_ptr + partner, mask=rotated, other=0.0).to(tl.float32) + 1.0
    gate = tl.load(source + D + dims, mask=mask & (head < Q_HEADS), other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position_ptr = positions_ptr + token * stride_pos_token
    position = tl.load(position_ptr).to(tl.int64)
    pair = dims % HALF
    if AXES == 3:
        height = tl.load(position_ptr + stride_pos_axis).to(tl.int64)
        width = tl.load(position_ptr + 2 * stride_pos_axis).to(tl.int64)
        tl.debug_barrier()
        of_height = (pair % 3 == 1) & (pair < 3 * SECTION_H)
        of_width = (pair % 3 == 2) & (pair < 3 * SECTION_W)
        position = tl.where(of_height, height, tl.where(of_width, width, position))
    else:
        tl.debug_barrier()
    angle = cos_sin_ptr + position * ROTARY + pair
    cos = tl.load(angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=rotated, other=0.0).to(tl.float32)

    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    # The published model rounds after the norm and again after the rotation.
    y = (x * inverse * weight).to(tl.bfloat16).to(tl.float32)
    other = (other * inverse * other_weight).to(tl.bfloat16).to(tl.float32)
    turned = tl.where(low, y * cos - other * sin, y * cos + other * sin)
    y = tl.where(rotated, turned, y).to(tl.bfloat16)
    if is_key:
        if slot >= 0:
            store_in_slot(
                y, slot, kv_head, keys_ptr, stride_keys_block, stride_keys_slot, stride_keys_head, key_scales_ptr,
                stride_kscale_block, stride_kscale_slot, stride_kscale_head, k_scale, dims, mask, BLOCK_SIZE, KIND,
            )  # fmt: skip
    else:
        out = (token * Q_HEADS + head) * D + dims
        tl.store(q_out_ptr + out, y, mask=mask)
        tl.store(gate_out_ptr + out, gate, mask=mask)
