# SPDX-License-Identifier: Apache-2.0
"""What happens between a sparse layer's projections and its selection, on a GPU.

Upstream's ``qsa_prepare`` does the indexer's part and the main attention's in one
launch.  Its main part stores bf16, or e4m3 through a pointer that needs sm_89.  For the
other caches the same kernel runs with no main heads, which leaves the indexer's part
alone, and ``norm_rope_gate_write`` follows: two launches where the unfused path takes
about a dozen.
"""

import torch

from vllm.platforms import current_platform

from ..nvidia.ops import qsa_prepare as upstream
from .formats import BF16, FP8, INT8, views
from .write import norm_rope_gate_write


def upstream_writes(cache_dtype: torch.dtype) -> bool:
    """Whether upstream's kernel can store to a cache of this dtype on this card."""
    if cache_dtype == torch.float8_e4m3fn:
        return current_platform.has_device_capability(89)
    return cache_dtype == BF16.dtype


def qsa_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *indexer: object,
    mrope_section: tuple[int, int, int] | None,
    main_qkv: torch.Tensor,
    main_q_norm_weight: torch.Tensor,
    main_k_norm_weight: torch.Tensor,
    main_eps: float,
    main_kv_cache: torch.Tensor,
    main_slot_mapping: torch.Tensor,
    main_k_scale: float,
    main_v_scale: float,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As upstream's function of this name, for a K/V cache of any format.

    ``main_kv_cache`` is ``[blocks, block_size, kv_heads, content]``, e4m3 where it is
    fp8.  Returns the main attention's query and gate, ``[tokens, heads, head_dim]``.
    """
    main = {
        "main_qkv": main_qkv,
        "main_q_norm_weight": main_q_norm_weight,
        "main_k_norm_weight": main_k_norm_weight,
        "main_eps": main_eps,
        "main_kv_cache": main_kv_cache,
        "main_slot_mapping": main_slot_mapping,
        "main_k_scale": main_k_scale,
        "main_v_scale": main_v_scale,
    }
    head_dim = main_q_norm_weight.shape[0]
    ours = not upstream_writes(main_kv_cache.dtype)
    if ours:
        # A bf16 cache of no heads: the kernel's main part must compile, and gets no program.
        main["main_qkv"] = main_qkv[:, :0]
        main["main_kv_cache"] = main_qkv.new_empty(1, 1, 0, 2 * head_dim)
    prepared = upstream.qsa_prepare(
        q, k, positions, cos_sin_cache, *indexer, mrope_section=mrope_section, **main, **options
    )
    if not ours:
        return prepared
    form = INT8 if main_kv_cache.dtype == INT8.dtype else FP8
    rows = views(main_kv_cache.view(form.dtype).transpose(1, 2), form, head_dim)
    return norm_rope_gate_write(
        main_qkv,
        positions,
        cos_sin_cache,
        main_q_norm_weight,
        main_k_norm_weight,
        main_eps,
        rows.keys,
        rows.values,
        main_slot_mapping,
        mrope_section=mrope_section,
        key_scales=rows.key_scales,
        value_scales=rows.value_scales,
        k_scale=main_k_scale,
        v_scale=main_v_scale,
    )


__all__ = ["qsa_prepare", "upstream_writes"]
