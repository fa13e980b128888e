# SPDX-License-Identifier: Apache-2.0
"""What writes rows and attends where they are in host memory: the layer's own, but for prompts."""

from typing import Any

import torch

from ..formats import FP8, kv_format
from .arena import arena_on
from .prompt import prompt_attention


class HostKVImpl:
    """Wraps the implementation that a sparse layer was built with.

    Writing rows, and steps in which every request brings a token or a few, are the wrapped
    one's: it reads selected rows straight from host memory, through addresses that a captured
    graph may keep. Steps with longer parts of prompts go over sections.
    """

    def __init__(self, inner: Any, arena_bytes: int) -> None:
        self._inner = inner
        self._arena_bytes = arena_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward_qsa(
        self, layer, query, key, value, kv_cache, attn_metadata, output, token_to_req, use_prefill_config, output_gate
    ) -> torch.Tensor:
        """Attend from ``query`` to what ``layer.topk_indices_buffer`` selects; see the wrapped class."""
        tokens = attn_metadata.num_actual_tokens
        if not use_prefill_config or not tokens:
            return self._inner.forward_qsa(
                layer, query, key, value, kv_cache, attn_metadata, output, token_to_req, use_prefill_config, output_gate
            )
        output[tokens:] = 0
        form = kv_format(layer.kv_cache_dtype)
        requests = min(attn_metadata.block_table.shape[0], attn_metadata.seq_lens.shape[0])
        prompt_attention(
            query[:tokens],
            kv_cache,
            form,
            layer.topk_indices_buffer[:tokens],
            attn_metadata.block_table,
            token_to_req[:tokens],
            layer.indexer.compress_ratio,
            requests * attn_metadata.max_seq_len,
            arena_on(query.device, self._arena_bytes),
            output[:tokens],
            output_gate=output_gate[:tokens],
            k_scale=layer._k_scale_float if form is FP8 else 1.0,
            v_scale=layer._v_scale_float if form is FP8 else 1.0,
        )
        return output
