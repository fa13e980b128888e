# SPDX-License-Identifier: Apache-2.0
"""What the attention layer calls on the CPU, in place of the FlashAttention impl."""

import torch

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from .attention import qsa_sparse_paged_attention

_E4M3_MAX = 448.0


def _to_storage(x: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
    """``x`` as the cache keeps it: its dtype, or e4m3 bytes of ``x / scale``."""
    if cache.dtype != torch.uint8:
        return x.to(cache.dtype)
    scaled = (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


class CpuQSAImpl:
    """K/V writes and sparse attention over a ``[blocks, kv_heads, size, 2 * width]``
    cache, with K in the first half of a row and V in the second."""

    def __init__(self, num_heads: int, head_size: int, *unused: object) -> None:
        # The layer passes FlashAttention's arguments; the rest (ALiBi, windows,
        # soft cap) it only ever leaves at None.
        self.num_heads = num_heads
        self.head_size = head_size

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write ``[tokens, kv_heads, width]`` keys and values into their slots."""
        slots = slot_mapping.long()
        kept = slots >= 0
        slots = slots[kept]
        tokens = slot_mapping.shape[0]
        keys, values = self._split(kv_cache)
        at = slots // keys.shape[1], slots % keys.shape[1]
        keys[at] = _to_storage(key[:tokens][kept], keys, layer._k_scale_float)
        values[at] = _to_storage(value[:tokens][kept], values, layer._v_scale_float)

    def forward_qsa(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: FlashAttentionMetadata, output: torch.Tensor,
        token_to_req: torch.Tensor, use_prefill_config: bool, output_gate: torch.Tensor
    ) -> torch.Tensor:
        """Attend from ``query`` to what ``layer.topk_indices_buffer`` selects.

        ``output`` is ``[tokens, heads, width]``; rows beyond the batch become zero.
        """
        tokens = attn_metadata.num_actual_tokens
        output[tokens:] = 0
        if not tokens:
            return output
        keys, values = self._split(kv_cache)
        scaled = kv_cache.dtype == torch.uint8
        qsa_sparse_paged_attention(
            query[:tokens],
            keys,
            values,
            layer.topk_indices_buffer[:tokens],
            attn_metadata.block_table,
            token_to_req[:tokens],
            use_prefill_config,
            output[:tokens],
            k_scale=layer._k_scale_float if scaled else None,
            v_scale=layer._v_scale_float if scaled else None,
            output_gate=output_gate[:tokens],
        )
        return output
