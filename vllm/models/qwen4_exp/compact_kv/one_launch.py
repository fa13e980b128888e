# SPDX-License-Identifier: Apache-2.0
"""One launch before attention: upstream's index keys and queries, and the main query, gate and cache as ours writes them.

Upstream has both in one kernel, whose cache write knows neither int8 nor e4m3 below sm_89.  Here the first programs run
that kernel, for no main heads, and the others ours.  Upstream's own function launches it, in the place of its kernel.
"""

from collections.abc import Callable

from vllm.triton_utils import tl, triton

from ..nvidia import model  # noqa: F401  before its parts: they import each other
from ..nvidia.ops.qsa_prepare import _qsa_prepare_kernel
from ..qsa.write import PackedLaunch, norm_rope_gate_write_kernel


@triton.jit(
    do_not_specialize=["num_tokens", "num_state_blocks", "num_compressed_blocks", "num_k_work", "index_programs"]
)
def prepare_kernel(
    # As upstream's, up to its main part.
    q_ptr, q_stride_token, k_ptr, k_stride_token, pos_ptr, pos_stride_axis, pos_stride_token, cos_sin_ptr,
    q_norm_weight_ptr, k_norm_weight_ptr, eps, q_out_ptr, q_out_stride_token, q_out_stride_head, state_cache_ptr,
    state_cache_stride_block, state_cache_stride_token, state_slots_ptr, state_table_ptr, state_table_stride_req,
    query_start_loc_ptr, logical_positions_ptr, compressed_slots_ptr, k_work_metadata_ptr, compressed_cache_ptr,
    compressed_cache_stride_block, compressed_cache_stride_token, num_tokens, num_state_blocks, num_compressed_blocks,
    num_k_work,
    # As `norm_rope_gate_write_kernel`.
    qkv_ptr, positions_ptr, main_cos_sin_ptr, q_weight_ptr, k_weight_ptr, main_eps, query_ptr, gate_ptr, keys_ptr,
    values_ptr, key_scales_ptr, value_scales_ptr, slots_ptr, k_scale, v_scale, index_programs, stride_qkv,
    stride_pos_axis, stride_pos_token, stride_keys_block, stride_keys_slot, stride_keys_head, stride_values_block,
    stride_values_slot, stride_values_head, stride_kscale_block, stride_kscale_slot, stride_kscale_head,
    stride_vscale_block, stride_vscale_slot, stride_vscale_head,
    HQ: tl.constexpr, D: tl.constexpr, TILE_T_Q: tl.constexpr, TILE_H_Q: tl.constexpr, COMPRESS_RATIO: tl.constexpr,
    STATE_SIZE: tl.constexpr, COMP_PAGE_SIZE: tl.constexpr, IS_2D_POSITIONS: tl.constexpr, IS_K_MROPE: tl.constexpr,
    CACHE_HAS_ROPE_POS: tl.constexpr, MROPE_H: tl.constexpr, MROPE_W: tl.constexpr, MAIN_BLOCK_SIZE: tl.constexpr,
    MAIN_D: tl.constexpr, MAIN_ROTARY: tl.constexpr, MAIN_Q_HEADS: tl.constexpr, MAIN_KV_HEADS: tl.constexpr,
    MAIN_AXES: tl.constexpr, MAIN_SECTION_H: tl.constexpr, MAIN_SECTION_W: tl.constexpr, MAIN_KIND: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) >= index_programs:
        norm_rope_gate_write_kernel(
            qkv_ptr, positions_ptr, main_cos_sin_ptr, q_weight_ptr, k_weight_ptr, main_eps, query_ptr, gate_ptr,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slots_ptr, k_scale, v_scale, index_programs,
            stride_qkv, stride_pos_axis, stride_pos_token, stride_keys_block, stride_keys_slot, stride_keys_head,
            stride_values_block, stride_values_slot, stride_values_head, stride_kscale_block, stride_kscale_slot,
            stride_kscale_head, stride_vscale_block, stride_vscale_slot, stride_vscale_head,
            MAIN_BLOCK_SIZE, MAIN_D, MAIN_ROTARY, MAIN_Q_HEADS, MAIN_KV_HEADS, MAIN_AXES, MAIN_SECTION_H,
            MAIN_SECTION_W, MAIN_KIND,
        )  # fmt: skip
        return
    # Its main part has no program here; some pointers for it to compile with.
    _qsa_prepare_kernel(
        q_ptr, q_stride_token, k_ptr, k_stride_token, pos_ptr, pos_stride_axis, pos_stride_token, cos_sin_ptr,
        q_norm_weight_ptr, k_norm_weight_ptr, eps, q_out_ptr, q_out_stride_token, q_out_stride_head, state_cache_ptr,
        state_cache_stride_block, state_cache_stride_token, state_slots_ptr, state_table_ptr, state_table_stride_req,
        query_start_loc_ptr, logical_positions_ptr, compressed_slots_ptr, k_work_metadata_ptr, compressed_cache_ptr,
        compressed_cache_stride_block, compressed_cache_stride_token, num_tokens, num_state_blocks,
        num_compressed_blocks, num_k_work,
        HQ, D, TILE_T_Q, TILE_H_Q, COMPRESS_RATIO, STATE_SIZE, COMP_PAGE_SIZE, IS_2D_POSITIONS, IS_K_MROPE,
        CACHE_HAS_ROPE_POS, MROPE_H, MROPE_W,
        main_qkv_ptr=qkv_ptr, main_qkv_stride_token=0, main_q_norm_weight_ptr=q_weight_ptr,
        main_k_norm_weight_ptr=k_weight_ptr, main_eps=main_eps, main_q_out_ptr=query_ptr, main_gate_out_ptr=gate_ptr,
        main_cache_ptr=query_ptr, main_cache_stride_block=0, main_cache_stride_token=0, main_cache_stride_head=0,
        main_slots_ptr=slots_ptr, main_k_scale=k_scale, main_v_scale=v_scale,
        MAIN_HQ=0, MAIN_HK=0, MAIN_D=MAIN_D, MAIN_PAGE_SIZE=1,
    )  # fmt: skip


class BesideMain:
    """What upstream's ``qsa_prepare`` launches instead of its kernel, whose programs are all of the index then."""

    def __init__(self, main: PackedLaunch) -> None:
        self.main = main

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        (index_programs,) = grid

        def launch(*index: object, num_warps: int, **named: object) -> None:
            of_index = {name: value for name, value in named.items() if not name.lower().startswith("main_")}
            of_main = {f"MAIN_{name}": value for name, value in self.main.constants.items()}
            prepare_kernel[(index_programs + self.main.programs,)](
                *index, *self.main.arguments(index_programs), **of_index, **of_main, num_warps=num_warps
            )

        return launch
