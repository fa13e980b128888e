# SPDX-License-Identifier: Apache-2.0
"""Keys and values into a layer's paged cache, quantized as they are written.

One program owns one token and head, holds its ``head_dim`` numbers in registers and
stores them once:

* ``write_rows`` takes keys and values that are ready, both by one program;
* ``norm_rope_gate_write`` takes the packed projection and does what stands between it
  and the cache in the same launch: norms of q and k, rotation, gate, cache.

What is stored never hides damage: a row with a NaN or an infinity gets a NaN scale
(int8) or NaN codes (fp8), so that the request which reads it notices.  Finite numbers
beyond e4m3's range saturate at 448 times the scale.

Pointers are bytes or bf16 on every card: e4m3 is encoded in arithmetic, because
Triton has no fp8 pointer below sm_89.
"""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton

from .e4m3 import encode
from .formats import BF16, FP8, INT8
from .write_reference import check_write, packed_heads

# int8 rows whose largest number is below this are stored as zeros: its reciprocal
# would leave fp32.
_SMALLEST = tl.constexpr(1e-30)
_INT8_MAX = tl.constexpr(127.0)
# Adding and subtracting 1.5 * 2**23 rounds an fp32 below 2**22 to the nearest even.
_ROUND = tl.constexpr(12582912.0)
_INF = tl.constexpr(float("inf"))

_BF16, _FP8, _INT8 = 0, 1, 2
_KINDS = {BF16.dtype: _BF16, FP8.dtype: _FP8, INT8.dtype: _INT8}


@triton.jit
def _store_row(x, row_ptr, scale_ptr, tensor_scale, dims, mask, KIND: tl.constexpr):
    """Store fp32 ``x`` (zeros where ``mask`` is off) as the cache keeps it.

    KIND 0: bf16.  KIND 1: e4m3 bytes of ``x / tensor_scale``.  KIND 2: int8 with the
    row's scale at ``scale_ptr``.
    """
    if KIND == 0:
        tl.store(row_ptr + dims, x.to(tl.bfloat16), mask=mask)
    elif KIND == 1:
        # div_rn, here and below: a plain division is approximate on a GPU.
        scaled = tl.div_rn(x, tensor_scale + tl.zeros_like(x))
        scaled = tl.where(tl.abs(x) < _INF, scaled, float("nan"))
        tl.store(row_ptr + dims, encode(scaled), mask=mask)
    else:
        finite = tl.abs(x) < _INF
        sound = tl.min(finite.to(tl.int32), axis=0) == 1
        x = tl.where(finite, x, 0.0)
        most = tl.max(tl.abs(x), axis=0)
        normal = most >= _SMALLEST
        divisor = tl.where(normal, most, 1.0)
        factor = tl.where(normal & sound, tl.div_rn(_INT8_MAX + 0.0 * most, divisor), 0.0)
        scale = tl.where(normal, tl.div_rn(most, _INT8_MAX + 0.0 * most), 0.0)
        codes = (x * factor + _ROUND) - _ROUND
        tl.store(row_ptr + dims, codes.to(tl.int8), mask=mask)
        tl.store(scale_ptr, tl.where(sound, scale, float("nan")))


@triton.jit
def _store_in_slot(
    x, slot, head, rows, row_block, row_slot, row_head, scales, scale_block, scale_slot, scale_head, tensor_scale, dims,
    mask, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """``_store_row`` of one head where the cache has ``slot``, which is not negative; strides as of ``rows`` and ``scales``."""
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    _store_row(
        x.to(tl.float32),
        rows + block * row_block + offset * row_slot + head * row_head,
        scales + block * scale_block + offset * scale_slot + head * scale_head,
        tensor_scale,
        dims,
        mask,
        KIND,
    )


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
    _store_in_slot(
        k, slot, head, keys_ptr, stride_keys_block, stride_keys_slot, stride_keys_head, key_scales_ptr,
        stride_kscale_block, stride_kscale_slot, stride_kscale_head, k_scale, dims, mask, BLOCK_SIZE, KIND,
    )  # fmt: skip
    v = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dims, mask=mask, other=0.0)
    _store_in_slot(
        v, slot, head, values_ptr, stride_values_block, stride_values_slot, stride_values_head, value_scales_ptr,
        stride_vscale_block, stride_vscale_slot, stride_vscale_head, v_scale, dims, mask, BLOCK_SIZE, KIND,
    )  # fmt: skip


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
            _store_in_slot(
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
            _store_in_slot(
                y, slot, kv_head, keys_ptr, stride_keys_block, stride_keys_slot, stride_keys_head, key_scales_ptr,
                stride_kscale_block, stride_kscale_slot, stride_kscale_head, k_scale, dims, mask, BLOCK_SIZE, KIND,
            )  # fmt: skip
    else:
        out = (token * Q_HEADS + head) * D + dims
        tl.store(q_out_ptr + out, y, mask=mask)
        tl.store(gate_out_ptr + out, gate, mask=mask)


def _scale_arguments(scales: torch.Tensor | None, rows: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    # Unscaled formats never touch the pointer.
    return (rows, (0, 0, 0)) if scales is None else (scales, scales.stride())


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
    k_scales, k_strides = _scale_arguments(key_scales, keys)
    v_scales, v_strides = _scale_arguments(value_scales, values)
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
        KIND=_KINDS[keys.dtype],
        num_warps=1,
    )


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
    k_scales, k_strides = _scale_arguments(key_scales, keys)
    v_scales, v_strides = _scale_arguments(value_scales, values)
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
        "KIND": _KINDS[keys.dtype],
    }  # fmt: skip
    return query, gate, PackedLaunch(tokens * (q_heads + 2 * kv_heads), before, after, constants)


__all__ = ["PackedLaunch", "norm_rope_gate_write", "norm_rope_gate_write_kernel", "packed_launch", "write_rows"]
