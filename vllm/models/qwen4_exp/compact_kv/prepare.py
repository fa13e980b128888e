# SPDX-License-Identifier: Apache-2.0
"""What comes before attention on a GPU: this step's rows into all caches, and kernels compiled ahead of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..qsa.formats import KVFormat, views

if TYPE_CHECKING:
    from .impl import PagedQSA


def prepare(
    form: KVFormat,
    head_size: int,
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
    """As upstream's `qsa_prepare`, in one launch, with the main cache in a format that it may not know.

    Args:
        form: of the main cache
        head_size: of the main keys
        index: upstream's positional arguments, positions and the table of cosines and sines the third and fourth
        main_kv_cache: `[blocks, block_size, kv_heads, content]`, of any dtype of a byte where the format is fp8
        options: its other keywords

    Returns the main query and gate, `[tokens, heads, head_size]`.
    """
    from ..nvidia.ops.qsa_prepare import qsa_prepare
    from ..qsa.write import packed_launch
    from .one_launch import BesideMain

    positions, cos_sin = index[2:4]
    cache = views(main_kv_cache.transpose(1, 2).view(form.dtype), form, head_size)
    query, gate, main = packed_launch(
        main_qkv,
        positions,
        cos_sin,
        main_q_norm_weight,
        main_k_norm_weight,
        main_eps,
        cache.keys,
        cache.values,
        main_slot_mapping,
        mrope_section,
        cache.key_scales,
        cache.value_scales,
        main_k_scale,
        main_v_scale,
    )
    # Without main heads upstream's function prepares a launch of the index alone.
    qsa_prepare(
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
        kernel=BesideMain(main),
        **options,
    )
    return query, gate


def warm_up(
    impl: PagedQSA,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    layer: Any,
    state_table: torch.Tensor,
    num_query_heads: int,
    selection_width: int,
) -> tuple[str, ...]:
    """Compile what requests will need, by running it on rows that select nothing and write nowhere.

    Args:
        layer: one of the sparse layers; decides which writer requests go through
        state_table: block table of its indexer's raw keys

    Returns what was compiled, for the log.
    """
    cache = impl._views(kv_cache)
    device, heads = kv_cache.device, cache.keys.shape[2]
    scales = {"key_scales": cache.key_scales, "value_scales": cache.value_scales}
    if layer.use_fused_qsa_prepare:
        writer = "fused write"
        _prepare_nothing(impl, layer, kv_cache, state_table, num_query_heads)
    else:
        writer = "write"
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
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


def _prepare_nothing(
    impl: PagedQSA, layer: Any, kv_cache: torch.Tensor, state_table: torch.Tensor, num_query_heads: int
) -> None:
    """`impl.prepare`, as the indexer calls it, for one token that no cache keeps and that ends no group.

    Triton compiles for a stride of one, a multiple of 16 and any other apart: rows of the projection are as long as they
    are with the indexer's beside it, and positions of three axes lie in rows of an odd length, as the runner keeps them.
    """
    indexer, device = layer.indexer, kv_cache.device
    width = 2 * (num_query_heads + kv_cache.shape[1]) * impl.head_size
    of_queries = indexer.index_n_heads * indexer.index_head_dim
    beside = of_queries + indexer.index_kv_heads * indexer.index_head_dim

    def numbers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    projected = torch.zeros(1, width + beside, dtype=torch.bfloat16, device=device)
    qkv, index = projected.split((width, beside), dim=1)
    if not layer.fuse_indexer_projection:
        qkv, index = qkv.contiguous(), index.contiguous()
    section = getattr(layer.rotary_emb, "mrope_section", None)
    positions = torch.zeros(3, 17, dtype=torch.int64, device=device)[:, :1]
    raw = indexer.raw_key_cache
    query = torch.empty(1, indexer.index_n_heads, indexer.index_head_dim, dtype=indexer.indexer_dtype, device=device)
    impl.prepare(
        index[:, :of_queries],
        index[:, of_queries:],
        positions if section else positions[0],
        layer.rotary_emb.cos_sin_cache,
        indexer.q_layernorm.weight,
        indexer.k_layernorm.weight,
        indexer.q_layernorm.variance_epsilon,
        query,
        raw.kv_cache,
        numbers(-1),
        state_table[:1],
        numbers(0, 1, dtype=torch.int32),
        numbers(0),
        indexer.compressed_key_cache.kv_cache,
        numbers(-1),
        numbers(-1, 0, dtype=torch.int32).unsqueeze(0),
        compress_ratio=indexer.compress_ratio,
        mrope_section=section,
        rope_pos_offset=raw.rope_position_offset if raw.rope_position_cache is not None else None,
        main_qkv=qkv,
        main_q_norm_weight=layer.q_norm.weight,
        main_k_norm_weight=layer.k_norm.weight,
        main_eps=layer.q_norm.variance_epsilon,
        main_kv_cache=kv_cache.transpose(1, 2),
        main_slot_mapping=numbers(-1),
        main_k_scale=layer._k_scale_float,
        main_v_scale=layer._v_scale_float,
    )
