# SPDX-License-Identifier: Apache-2.0
"""What writes rows and attends where they are in host memory: the layer's own, but for prompts."""

from copy import copy
from typing import Any

import torch

from vllm.forward_context import get_forward_context

from ..formats import FP8, KVFormat
from .arena import arena_on
from .prompt import prompt_attention


def step_of(layer: Any) -> Any:
    """What the indexer's metadata has counted of this step on the host.

    Of requests that bring one token each the runner puts the rows, ``num_decode_tokens``, in front of all others; of the
    others there is ``prompt_contexts`` (``contexts.py``).
    """
    metadata = get_forward_context().attn_metadata
    return (metadata[0] if isinstance(metadata, list) else metadata)[layer.indexer.raw_key_cache.prefix]


class HostKVImpl:
    """Wraps the implementation that a sparse layer was built with.

    Writing rows, and requests that bring a token each, are the wrapped one's: it reads selected
    rows straight from host memory, through addresses that a captured graph may keep. Longer parts
    of prompts go over sections. A step may hold both; a decoding request is then computed as in a
    step of its own, so that who else is there changes no bit of it.
    """

    def __init__(self, inner: Any, form: KVFormat, ratio: int, arena_bytes: int) -> None:
        """Wrap ``inner``, for rows of ``form`` selected in groups of ``ratio``."""
        self._inner = inner
        self._form, self._ratio, self._arena_bytes = form, ratio, arena_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward_qsa(
        self, layer, query, key, value, kv_cache, attn_metadata, output, token_to_req, use_prefill_config, output_gate
    ) -> torch.Tensor:
        """Attend from ``query`` to what ``layer.topk_indices_buffer`` selects; see the wrapped class."""
        tokens = attn_metadata.num_actual_tokens
        rest = (layer, query, key, value, kv_cache)
        if not use_prefill_config or not tokens:
            return self._inner.forward_qsa(*rest, attn_metadata, output, token_to_req, use_prefill_config, output_gate)
        output[tokens:] = 0
        step = step_of(layer)
        decodes = step.num_decode_tokens
        if decodes:
            some = copy(attn_metadata)
            some.num_actual_tokens = decodes
            self._inner.forward_qsa(*rest, some, output[:decodes], token_to_req, False, output_gate)
        prompts = slice(decodes, tokens)
        prompt_attention(
            query[prompts],
            kv_cache,
            self._form,
            layer.topk_indices_buffer[prompts],
            attn_metadata.block_table,
            token_to_req[prompts],
            self._ratio,
            step.prompt_contexts,
            arena_on(query.device, self._arena_bytes),
            output[prompts],
            output_gate=output_gate[prompts],
            k_scale=layer._k_scale_float if self._form is FP8 else 1.0,
            v_scale=layer._v_scale_float if self._form is FP8 else 1.0,
        )
        return output

    def warm_up(self, kv_cache: torch.Tensor, block_table: torch.Tensor, **shape: Any) -> object:
        """Compile the wrapped kernels and those of sections, on a token that selects nothing."""
        profiles = self._inner.warm_up(kv_cache, block_table, **shape)
        query = kv_cache.new_zeros(1, shape["num_query_heads"], self._inner.head_size, dtype=torch.bfloat16)
        selected = block_table.new_zeros(1, shape["selection_width"] + 1, dtype=torch.int32)
        prompt_attention(
            query,
            kv_cache,
            self._form,
            selected,
            block_table[:1],
            block_table.new_zeros(1, dtype=torch.int32),
            self._ratio,
            1,
            arena_on(query.device, self._arena_bytes),
            torch.empty_like(query),
            output_gate=query,
        )
        return profiles
