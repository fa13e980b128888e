# SPDX-License-Identifier: Apache-2.0
"""What comes before attention on a GPU: this step's rows into all caches, and kernels compiled ahead of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..qsa.formats import KVFormat, KVViews, views

if TYPE_CHECKING:
    from .impl import PagedQSA


def prepare(
    form: KVFormat,
    head_size: int,
    write_main: Callable,
    upstream_prepare: Callable,
    *index: object,
    main_kv_cache: torch.Tensor,
    main_k_scale: float,
    main_v_scale: float,
    main_qkv: torch.Tensor,
    main_q_norm_weight: torch.Tensor,
    main_k_norm_weight: torch.Tensor,
    main_slot_mapping: torch.Tensor,
    main_eps: float,
    mrope_section: tuple[int, int, int] | None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two launches in place of upstream's one, whose cache write knows neither int8 nor e4m3 below sm_89.

    Args:
        form: of the main cache
        head_size: of the main keys
        write_main: `norm_rope_gate_write` of ../qsa
        upstream_prepare: upstream's `qsa_prepare`. It runs without main heads, which leaves the index queries and keys.
        index: its positional arguments, positions and the table of cosines and sines the third and fourth
        main_kv_cache: `[blocks, block_size, kv_heads, content]`, of any dtype of a byte where the format is fp8
        options: its other keywords

    Returns the main query and gate, `[tokens, heads, head_size]`.
    """
    positions, cos_sin = index[2:4]
    cache = views(main_kv_cache.transpose(1, 2).view(form.dtype), form, head_size)
    main = write_main(
        main_qkv,
        positions,
        cos_sin,
        main_q_norm_weight,
        main_k_norm_weight,
        main_eps,
        cache.keys,
        cache.values,
        main_slot_mapping,
        mrope_section=mrope_section,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        k_scale=main_k_scale,
        v_scale=main_v_scale,
    )
    upstream_prepare(
        *index,
        mrope_section=mrope_section,
        main_qkv=main_qkv[:, :0],
        main_q_norm_weight=main_q_norm_weight,
        main_k_norm_weight=main_k_norm_weight,
        main_eps=main_eps,
        main_kv_cache=main_qkv.new_empty(1, 1, 0, 2 * head_size),
        main_slot_mapping=main_slot_mapping,
        main_k_scale=1.0,
        main_v_scale=1.0,
        **options,
    )
    return main


def warm_up(
    impl: PagedQSA,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    layer: Any,
    num_query_heads: int,
    selection_width: int,
) -> tuple[str, ...]:
    """Compile what requests will need, by running it on rows that select nothing and write nowhere.

    Args:
        layer: one of the sparse layers; decides which writer requests go through

    Returns what was compiled, for the log.
    """
    cache = impl._views(kv_cache)
    device, heads = kv_cache.device, cache.keys.shape[2]
    scales = {"key_scales": cache.key_scales, "value_scales": cache.value_scales}
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    if layer.use_fused_qsa_prepare:
        writer = "fused write"
        _write_packed(impl, layer, cache, nowhere, num_query_heads, scales)
    else:
        writer = "write"
        rows = torch.zeros(1, heads, impl.head_size, dtype=torch.bfloat16, device=device)
        impl.write(rows, rows, cache.keys, cache.values, nowhere, **scales)
    query = torch.zeros(1, num_query_heads, impl.head_size, dtype=torch.bfloat16, device=device)
    selected = torch.full((1, selection_width + 1), -1, dtype=torch.int32, device=device)
    selected[:, -1] = 0
    request = torch.zeros(1, dtype=torch.int32, device=device)
    for prefill in (False, True):
        impl.attend(
            query,
            cache.keys,
            cache.values,
            selected,
            block_table[:1],
            request,
            torch.empty_like(query),
            output_gate=query,
            prefill=prefill,
            **scales,
        )
    return tuple(f"{impl.form.name} {kernel}" for kernel in (writer, "decode", "prefill"))


def _write_packed(
    impl: PagedQSA, layer: Any, cache: KVViews, slots: torch.Tensor, num_query_heads: int, scales: dict[str, Any]
) -> None:
    """The writer that `prepare` calls, on a projection that lies as the layer's does.

    Triton compiles for a stride of one, a multiple of 16 and any other apart: the projection's row is as long as it is
    with the indexer's beside it, and positions of three axes lie in rows of an odd length, as the runner keeps them.
    """
    width = 2 * (num_query_heads + cache.keys.shape[2]) * impl.head_size
    beside = layer.index_qk_size if layer.fuse_indexer_projection else 0
    qkv = torch.zeros(1, width + beside, dtype=torch.bfloat16, device=slots.device)[:, :width]
    section = getattr(layer.rotary_emb, "mrope_section", None)
    positions = torch.zeros(3, 17, dtype=torch.int64, device=slots.device)[:, :1]
    impl.write_packed(
        qkv,
        positions if section else positions[0],
        layer.rotary_emb.cos_sin_cache,
        layer.q_norm.weight,
        layer.k_norm.weight,
        layer.q_norm.variance_epsilon,
        cache.keys,
        cache.values,
        slots,
        mrope_section=section,
        k_scale=layer._k_scale_float,
        v_scale=layer._v_scale_float,
        **scales,
    )
