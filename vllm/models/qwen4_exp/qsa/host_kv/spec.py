# SPDX-License-Identifier: Apache-2.0
"""What a sparse layer asks of the GPU's KV cache when its K/V is in host memory.

The layer still needs a place in a cache group: that gives it the block table and the slots
of its tokens, which are shared with its pooled keys. The place has to have a size, because
the planner lays pages side by side. The smallest full-attention page that upstream can
express per token is 2 bytes (one head of width one in a byte each for K and V), which is
the "slot number" of the scheme that this follows: 66 bytes a token beside 64 of pooled key.
Nothing reads it: a slot is already ``block * block_size + offset``. Here the place has one
state per block, 16 bytes, whatever the block's size.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.config.qsa import offloads_kv
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, replace_as

from .errors import KVOffloadRefused
from .lines import LINE, whole_lines

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Keeps the pages behind it on the alignment that wide loads want.
PLACE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class HostKVSpec(FullAttentionSpec):
    """Full attention whose rows are in host memory: a place in the block pool and no more."""

    row_bytes: int
    """Host memory of one token in this layer: K and V of its heads, with scales, in whole lines."""

    @property
    def host_page_bytes(self) -> int:
        """Host memory of one block in this layer."""
        return self.block_size * self.row_bytes


def spec_on_gpu(layer: Any, vllm_config: "VllmConfig", rows: FullAttentionSpec) -> KVCacheSpec:
    """The spec that a sparse layer reports: ``rows`` itself, or a place for them.

    Args:
        layer: an attention layer of class ``HostKVLayer``; remembers ``rows``.
        vllm_config: whose qsa_config decides.
        rows: the spec of its K/V in the GPU's cache.

    Raises:
        KVOffloadRefused: half an arena is less than the rows of one pooled key.
    """
    if not offloads_kv(vllm_config):
        return rows
    arena_bytes = vllm_config.qsa_config.arena_bytes
    layer.host_rows = HostRows(rows, arena_bytes)
    group = layer.host_rows.row_bytes * vllm_config.model_config.hf_text_config.indexer_compress_ratio
    if arena_bytes < 2 * (group + LINE):
        raise KVOffloadRefused(
            "--qsa-config arena_bytes",
            arena_bytes,
            f"holds less than two groups of {group} bytes.",
            "Leave it out for 96 MiB; less than some MiB is slow.",
        )
    return replace_as(
        rows,
        HostKVSpec,
        row_bytes=layer.host_rows.row_bytes,
        num_head_slots=1,
        state_content_bytes=PLACE_BYTES,
        tokens_per_state=rows.block_size,
        page_size_padded=None,
    )


@dataclass(frozen=True)
class HostRows:
    """What a layer keeps in host memory, and through how much GPU memory prompts read it."""

    rows: FullAttentionSpec
    arena_bytes: int

    @property
    def row_bytes(self) -> int:
        """One token, all K/V heads of this rank, padded to whole lines."""
        return whole_lines(replace(self.rows, page_size_padded=None).page_size_bytes // self.rows.block_size)
