# SPDX-License-Identifier: Apache-2.0
"""What a sparse-attention layer calls: write this step's K/V, then attend over the rows that were selected."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vllm.config import get_current_vllm_config_or_none

from ..qsa.formats import FP8, KVFormat, KVViews, kv_format, views
from ..qsa.index_keys import codes
from .choice import Kernels, chosen
from .prepare import prepare, warm_up


def choose(cache_dtype: str) -> tuple[KVFormat, Kernels]:
    """Format and kernels of a layer, by the configuration that is current while layers are built."""
    form = kv_format(cache_dtype)
    config = get_current_vllm_config_or_none()
    return form, chosen(form.name, getattr(config, "qsa_config", None))


class PagedQSA:
    """The two calls over pages of any format.

    Scales of int8 rows lie in the page, so a block that is shared, copied or zeroed takes them along. Views are made
    at each call: the bound cache stays the only reference to its memory, which vLLM frees and binds again after
    measuring CUDA graphs.

    Attributes:
        head_size: width of a key
        form: how K/V are stored
        write, attend: functions of ../qsa, or of their signatures
    """

    head_size: int
    form: KVFormat
    write: Callable
    attend: Callable

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write ``[tokens, kv_heads, width]`` keys and values into their slots; rows behind the slots are padding."""
        cache = self._views(kv_cache)
        tokens = slot_mapping.shape[0]
        k_scale, v_scale = self._layer_scales(layer)
        self.write(
            key[:tokens],
            value[:tokens],
            cache.keys,
            cache.values,
            slot_mapping,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def forward_qsa(
        self, layer, query, key, value, kv_cache, attn_metadata, output, token_to_req, use_prefill_config, output_gate
    ) -> torch.Tensor:
        """Attend from ``query`` to what ``layer.topk_indices_buffer`` selects.

        ``query``, ``output`` and ``output_gate`` are ``[tokens, heads, width]``; rows of ``output`` beyond the batch
        become zero.
        """
        tokens = attn_metadata.num_actual_tokens
        output[tokens:] = 0
        if not tokens:
            return output
        cache = self._views(kv_cache)
        k_scale, v_scale = self._layer_scales(layer)
        self.attend(
            query[:tokens],
            cache.keys,
            cache.values,
            layer.topk_indices_buffer[:tokens],
            attn_metadata.block_table,
            token_to_req[:tokens],
            output[:tokens],
            output_gate=output_gate[:tokens],
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            k_scale=k_scale,
            v_scale=v_scale,
            prefill=use_prefill_config,
        )
        return output

    def _views(self, kv_cache: torch.Tensor) -> KVViews:
        return views(kv_cache, self.form, self.head_size)

    def _layer_scales(self, layer: torch.nn.Module) -> tuple[float, float]:
        """Of a whole layer's K and V. Only e4m3 has them, and the layer keeps upstream's 1.0."""
        return (layer._k_scale_float, layer._v_scale_float) if self.form is FP8 else (1.0, 1.0)


@cache
def own_impl(gpu_impl: type) -> type:
    """``gpu_impl``, upstream's class, with our kernels in the formats that ``choice`` gives them."""

    class OwnQSAImpl(PagedQSA, gpu_impl):
        def __init__(
            self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, *rest
        ) -> None:
            # Upstream's constructor knows two formats; it reads the name for nothing but refusing others.
            super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, "auto", *rest)
            self.kv_cache_dtype = kv_cache_dtype
            self.form, kernels = choose(kv_cache_dtype)
            #: Whether the layer's K/V go through our kernels; the layer then writes them in `prepare`, at any format.
            self.ours = kernels is Kernels.OURS
            if self.ours:
                from ..qsa.attention import sparse_paged_attention
                from ..qsa.write import write_rows

                self.write, self.attend = write_rows, sparse_paged_attention

        def do_kv_cache_update(self, *args, **kwargs) -> None:
            base = PagedQSA if self.ours else gpu_impl
            base.do_kv_cache_update(self, *args, **kwargs)

        def forward_qsa(self, *args, **kwargs) -> torch.Tensor:
            base = PagedQSA if self.ours else gpu_impl
            return base.forward_qsa(self, *args, **kwargs)

        def prepare(self, *index, **keywords) -> tuple[torch.Tensor, torch.Tensor]:
            """As upstream's ``qsa_prepare``: index keys, and the main query, gate and cache write."""
            # Index queries and keys of one byte: the kernel encodes them where it sees bytes.
            index = tuple(codes(argument) for argument in index)
            if self.ours:
                return prepare(self.form, self.head_size, *index, **keywords)
            from ..nvidia.ops.qsa_prepare import qsa_prepare

            return qsa_prepare(*index, **keywords)

        def warm_up(
            self,
            kv_cache: torch.Tensor,
            block_table: torch.Tensor,
            *,
            layer: Any,
            state_table: torch.Tensor,
            **shape: int,
        ) -> object:
            """As upstream's ``warmup_qsa_sparse_paged_attention``, of ``layer``; returns something for the log.

            ``state_table`` is the block table of the indexer's raw keys.
            """
            if self.ours:
                return warm_up(self, kv_cache, block_table, layer=layer, state_table=state_table, **shape)
            from ..nvidia.ops.qsa import warmup_qsa_sparse_paged_attention

            return warmup_qsa_sparse_paged_attention(kv_cache, block_table, **shape)

    return OwnQSAImpl
