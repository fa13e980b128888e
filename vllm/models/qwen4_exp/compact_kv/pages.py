# SPDX-License-Identifier: Apache-2.0
"""Bytes of a page by format, as upstream's generic attention has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


class CompactPages:
    """Mixed into an attention backend: pages of int8_per_token_head hold an fp32 scale of each head's K and V.

    The sparse layers' side caches need it beside the main backend. Block alignment of hybrid models asks the backend of
    the first layer that registered, which is a side cache's, for the size of a page of the *main* cache, and would pad
    the linear-attention states to a size without scales. A side cache's own spec has no quantization and is left alone.
    """

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        # Asked of upstream's backend rather than computed, so that the size is upstream's by construction.
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        return TritonAttentionBackend.customize_spec(super().customize_spec(spec))
