# SPDX-License-Identifier: Apache-2.0
"""What comes before attention on a GPU: this step's rows into all caches, and kernels compiled ahead of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..qsa.formats import KVFormat, views

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
    impl: PagedQSA, kv_cache: torch.Tensor, block_table: torch.Tensor, *, num_query_heads: int, selection_width: int
) -> tuple[str, ...]:
    """Compile what requests will need, by running it on rows that select nothing and write nowhere.

    Returns what was compiled, for the log.
    """
    cache = impl._views(kv_cache)
    device, heads = kv_cache.device, cache.keys.shape[2]
    rows = torch.zeros(1, heads, impl.head_size, dtype=torch.bfloat16, device=device)
    scales = {"key_scales": cache.key_scales, "value_scales": cache.value_scales}
    impl.write(rows, rows, cache.keys, cache.values, torch.full((1,), -1, dtype=torch.int64, device=device), **scales)
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
    return (f"{impl.form.name} write", f"{impl.form.name} decode", f"{impl.form.name} prefill")
