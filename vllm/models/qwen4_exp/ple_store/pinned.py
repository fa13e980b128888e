# SPDX-License-Identifier: Apache-2.0
"""Upstream's table in pinned host memory, in as much memory as it has bytes.

torch's allocator of pinned memory rounds up to a power of two: the published table of 95.4 GiB takes 128 GiB, and does
not start on machines where it would fit.  Here memory is mapped to the byte (to the page), and then registered with
CUDA, which pins it and gives the device an address for it.
"""

import mmap
import resource
import weakref
from typing import Any

import numpy as np
import torch

from vllm.utils.free_memory import available_bytes

from ..common import ngram_embedding as upstream
from .errors import TableNotPinned


class Qwen4ExpPLEExactPinnedEmbedding(upstream.Qwen4ExpPLEPinnedHostEmbedding):
    """Upstream's layer over memory of exact size; everything else is upstream's."""

    def allocate_embedding_weight(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """A pinned ``[num_embeddings, embedding_dim]``.  Raises TableNotPinned."""
        return page_locked((num_embeddings, embedding_dim), dtype)


def page_locked(shape: tuple[int, ...], dtype: torch.dtype, runtime: Any = None) -> torch.Tensor:
    """Host memory that the device may read, of the size that was asked for.

    Pages come into being as they are pinned, not before: a machine without the memory is told so here, and not by the
    kernel's out-of-memory killer while weights load.

    Args:
        shape, dtype: of the tensor, contiguous
        runtime: `torch.cuda.cudart()` unless given

    Returns:
        a tensor on the CPU; its memory is unpinned and given back with its last view, or when the interpreter ends

    Raises:
        TableNotPinned: too little memory, or CUDA or the limit of locked memory refused
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    free = available_bytes()
    if size > free:
        raise TableNotPinned(f"{size / 2**30:.1f} GiB", "as much memory", f"{free / 2**30:.1f} GiB available")
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Its finalizer holds the mapping until CUDA has let go of it.
    owner = np.frombuffer(memory, dtype=np.uint8, count=size)
    runtime = runtime if runtime is not None else torch.cuda.cudart()
    result = runtime.cudaHostRegister(owner.ctypes.data, size, 0)
    if int(result) != 0:
        raise TableNotPinned(f"{size / 2**30:.1f} GiB", "pinned memory", f"{result}, with {_limits(free)}")
    weakref.finalize(owner, _release, runtime, owner.ctypes.data, memory)
    return torch.from_numpy(owner).view(dtype).view(shape)


def _limits(free: int) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = (
        "no limit of locked memory"
        if soft == resource.RLIM_INFINITY
        else f"at most {soft / 2**30:.2f} GiB locked (ulimit -l)"
    )
    return f"{locked} and {free / 2**30:.1f} GiB available"


def _release(runtime: Any, address: int, memory: mmap.mmap) -> None:
    """``memory`` is only kept until here: unmapping what CUDA has pinned would be an error at the next use."""
    runtime.cudaHostUnregister(address)
    del memory
