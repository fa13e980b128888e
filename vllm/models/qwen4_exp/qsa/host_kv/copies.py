# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write of host rows, for prefix hits that end inside a block."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .layer import HostKVLayer
from .lines import whole_rows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


def copy_host_blocks(
    context: dict[str, Any], kv_cache_config: "KVCacheConfig", scheduler_output: "SchedulerOutput"
) -> None:
    """Copy the rows of blocks that a request is about to write on from a shared block.

    The scheduler names pairs of blocks without the group that they are of, and a pair of
    another group has no rows worth copying: a hit that ends inside a block copies a state
    of every linear group with it. So pairs are kept whose target is in the block table of a
    sparse group; a request gets such blocks when it is scheduled first, or again.

    Args:
        context: layer name to layer.
        kv_cache_config: whose groups say which layers share a block table.
        scheduler_output: of this step.
    """
    pairs = scheduler_output.kv_cache_block_copies
    if not pairs:
        return
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        layers = [
            layer
            for name in group.layer_names
            if isinstance(layer := context.get(name), HostKVLayer) and layer.host_memory is not None
        ]
        if not layers:
            continue
        mine = new_blocks(scheduler_output, group_id)
        copy_rows(layers, [(source, target) for source, target in pairs if target in mine])


def new_blocks(scheduler_output: "SchedulerOutput", group_id: int) -> set[int]:
    """Blocks that requests get in this step in one group."""
    found: set[int] = set()
    for request in scheduler_output.scheduled_new_reqs:
        found.update(request.block_ids[group_id])
    for blocks in scheduler_output.scheduled_cached_reqs.new_block_ids:
        if blocks is not None:
            found.update(blocks[group_id])
    return found


def copy_rows(layers: Sequence[HostKVLayer], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy all rows of ``(source, target)`` blocks, in order with the kernels of this step."""
    for layer in layers:
        # With what pads the rows, in one run of memory: a copy without it would go row by row.
        blocks = whole_rows(layer.kv_cache)
        for source, target in pairs:
            blocks[target].copy_(blocks[source])
