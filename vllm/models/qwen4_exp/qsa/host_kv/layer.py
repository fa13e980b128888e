# SPDX-License-Identifier: Apache-2.0
"""Binds rows in host memory to a sparse layer as if they were its KV cache.

vLLM hands each layer a view of the GPU's cache, one entry per block. A layer with rows in
host memory gets the place that ``spec.py`` asked for, takes from it how many blocks there
are, and allocates rows for as many: ``[blocks, kv_heads, block_size, content]`` like any
other cache, with the row of a token together in memory, in whole lines (``lines.py``). Kernels
that write rows and read selected ones then work on it unchanged, over PCIe where it is a view.
"""

import torch

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

from ..formats import kv_format
from .impl import HostKVImpl
from .lines import by_head
from .memory import GIB, HostMemory
from .spec import HostRows

logger = init_logger(__name__)


class HostKVLayer:
    """Base of an attention layer whose rows may be in host memory."""

    host_rows: HostRows | None = None
    """Set with the spec that the layer reports; None where rows are in its KV cache."""
    host_memory: HostMemory | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Bind the GPU's cache, or rows in host memory for as many blocks.

        Args:
            kv_cache: ``[blocks, ...]``.

        Raises:
            HostMemoryRefused: there is no such memory.
        """
        if self.host_rows is None:
            super().bind_kv_cache(kv_cache)
            return
        if not isinstance(self.impl, HostKVImpl):
            form, ratio = kv_format(self.kv_cache_dtype), self.indexer.compress_ratio
            self.impl = HostKVImpl(self.impl, form, ratio, self.host_rows.arena_bytes)
        if self.host_memory is not None:
            # Profiling binds a cache of a few blocks before the real one.
            self.kv_cache = torch.tensor([])
            self.host_memory.release()
        blocks, rows = kv_cache.shape[0], self.host_rows
        size = blocks * rows.rows.block_size * rows.row_bytes
        self.host_memory = HostMemory(size, kv_cache.device, self.layer_name)
        self.kv_cache = rows_view(self.host_memory.view, rows, blocks)
        logger.info(
            "K/V of %s: %d blocks of %d rows of %d bytes in host memory, %.2f GiB.",
            self.layer_name,
            blocks,
            rows.rows.block_size,
            rows.row_bytes,
            size / GIB,
        )


def rows_view(raw: torch.Tensor, rows: HostRows, blocks: int) -> torch.Tensor:
    """``[blocks, kv_heads, block_size, content]`` over the bytes of ``raw``, where all heads of a token lie together."""
    _, heads, size, content = compute_layer_kv_cache_shape_bytes(rows.rows, blocks)
    dtype = rows.rows.dtype
    return by_head(raw.view(blocks, size, rows.row_bytes), heads, content // dtype.itemsize, dtype)
