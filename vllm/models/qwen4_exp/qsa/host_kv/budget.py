# SPDX-License-Identifier: Apache-2.0
"""As many blocks as host memory holds on every stage, or a refusal with the numbers.

A block has one number on all stages and in both memories, so the stage that can have fewest
decides. Upstream's planner already takes the smallest of what the workers' GPU memory gives;
here that memory is lowered to what host memory can serve, before anything is planned with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs, iter_layer_specs

from .errors import HostKVDoesNotFit
from .memory import available_bytes
from .spec import HostKVSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)
GIB = 1 << 30


@dataclass(frozen=True)
class Worker:
    """One rank: bytes of one block in both memories, and what its GPU gives; bytes."""

    gpu_block: int
    host_block: int
    gpu_there: int


@dataclass(frozen=True)
class Need:
    """What one request of the longest context needs, and what all workers can have together."""

    workers: tuple[Worker, ...]
    block_size: int
    request_blocks: int
    context: int
    host_there: int
    host_limit: str

    @property
    def host_block(self) -> int:
        return sum(worker.host_block for worker in self.workers)

    @property
    def host_blocks(self) -> int:
        """Blocks that host memory can serve."""
        return self.host_there // self.host_block

    @property
    def blocks(self) -> int:
        """Blocks that all memories can serve."""
        return min(self.host_blocks, *(w.gpu_there // w.gpu_block for w in self.workers if w.gpu_block))

    def table(self) -> str:
        """What is needed and what is there, a line for each memory."""
        lines = [
            f"One request of {self.context} tokens takes {self.request_blocks} blocks of {self.block_size} tokens, "
            "with its linear-attention states and the block that is never used:",
            f"  {'':<28}{'needed':>12}{'there':>12}",
            _line("host memory, all stages", self.request_blocks * self.host_block, self.host_there)
            + f"  {self.host_limit}",
        ]
        lines += [
            _line(f"KV cache of rank {rank}", self.request_blocks * worker.gpu_block, worker.gpu_there)
            for rank, worker in enumerate(self.workers)
            if worker.gpu_block
        ]
        return "\n".join(lines)


def _line(what: str, needed: int, there: int) -> str:
    return f"  {what:<28}{needed / GIB:>8.2f} GiB{there / GIB:>8.2f} GiB" + ("" if needed <= there else "  too small")


def within_host_memory(
    vllm_config: "VllmConfig",
    block_bytes: Callable[[list[KVCacheGroupSpec]], int],
    workers_groups: Sequence[list[KVCacheGroupSpec]],
    available: Sequence[int],
) -> list[int]:
    """GPU memory of each worker for its KV cache, no more than host memory can keep the rows of.

    Called by the planner, once per start, in the engine's process.

    Args:
        vllm_config: of the server.
        block_bytes: GPU bytes of a block, from a worker's groups.
        workers_groups: cache groups projected to each worker.
        available: GPU bytes that each worker has for its KV cache.

    Raises:
        HostKVDoesNotFit: one request of the longest context would not fit, in either memory.
    """
    workers = tuple(
        Worker(block_bytes(groups) if groups else 0, host_block_bytes(groups), there)
        for groups, there in zip(workers_groups, available)
    )
    need = _need(vllm_config, workers, max(workers_groups, key=host_block_bytes))
    # With a context to be fitted, upstream looks for the longest that the blocks allow.
    if vllm_config.model_config.original_max_model_len != -1 and need.blocks < need.request_blocks:
        raise HostKVDoesNotFit(
            "K/V in host memory does not fit (--qsa-config kv_offload).\n" + need.table() + "\n" + _remedy(need)
        )
    logger.info_once(
        "K/V in host memory: %d blocks of %d tokens, %.2f GiB over all stages (%s).",
        need.blocks,
        need.block_size,
        need.blocks * need.host_block / GIB,
        "limited by " + ("host memory" if need.host_blocks == need.blocks else "the KV cache on a GPU"),
    )
    return [
        min(there, need.host_blocks * worker.gpu_block) if worker.gpu_block else there
        for worker, there in zip(workers, available)
    ]


def host_block_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Host bytes of one block over the layers of these groups."""
    return sum(spec.host_page_bytes for group in groups for spec in _specs_of(group) if isinstance(spec, HostKVSpec))


def _specs_of(group: KVCacheGroupSpec):
    # A group without layers on this worker keeps the specs of the others.
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return [group.kv_cache_spec.kv_cache_specs[name] for name in group.layer_names]
    return iter_layer_specs(group.kv_cache_spec) if group.layer_names else ()


def _need(vllm_config: "VllmConfig", workers: tuple[Worker, ...], groups: list[KVCacheGroupSpec]) -> Need:
    # The same arithmetic as upstream's admission check, plus the null block of the pool.
    blocks = 1 + sum(
        group.kv_cache_spec.max_memory_usage_pages(vllm_config)
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        else cdiv(group.kv_cache_spec.max_memory_usage_bytes(vllm_config), group.kv_cache_spec.page_size_bytes)
        for group in groups
    )
    there, limit = host_memory_there(vllm_config, workers)
    # Not cache_config's: the workers chose it, and this process hears of it later.
    block_size = next(s.block_size for group in groups for s in _specs_of(group) if isinstance(s, HostKVSpec))
    return Need(workers, block_size, blocks, vllm_config.model_config.max_model_len, there, limit)


def host_memory_there(vllm_config: "VllmConfig", workers: Sequence[Worker]) -> tuple[int, str]:
    """Host bytes that all workers may take, and what sets that limit.

    Memory of other machines cannot be seen from here. There each worker looks itself when it
    asks for its rows, and the limit set by the user is all that is known before.
    """
    free = available_bytes() if _one_machine(vllm_config) else None
    if free is not None and current_platform.is_cpu():
        # What stands for GPU memory is allocated from the same.
        free = max(0, free - sum(worker.gpu_there for worker in workers))
    most = vllm_config.qsa_config.kv_offload_max_gib
    if most is not None and (free is None or most * GIB <= free):
        return int(most * GIB), "kv_offload_max_gib"
    if free is None:
        return sum(w.host_block * (w.gpu_there // w.gpu_block) for w in workers if w.gpu_block), "not limited"
    return free, "free host memory"


def _one_machine(vllm_config: "VllmConfig") -> bool:
    parallel = vllm_config.parallel_config
    return parallel.distributed_executor_backend != "ray" and getattr(parallel, "nnodes", 1) == 1


def _remedy(need: Need) -> str:
    if need.host_blocks < need.request_blocks:
        return (
            "Give it more host memory (kv_offload_max_gib, where that is the limit), a shorter --max-model-len, or "
            "--kv-cache-dtype int8_per_token_head, which halves the rows."
        )
    return (
        "Give the KV cache more GPU memory (--kv-cache-memory, --gpu-memory-utilization) or a shorter --max-model-len."
    )
