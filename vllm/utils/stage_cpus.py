# SPDX-License-Identifier: Apache-2.0
"""Cores and memory of the workers of one machine, when it has fewer NUMA nodes.

Upstream binds each worker to a NUMA node of its own and stops where there are fewer
nodes than workers: every pipeline on an ordinary desktop.  Here the workers then get
the cores of the nodes that there are, in equal runs, or one each in turn where there
are fewer cores than workers; and they share the node's memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm import envs
from vllm.utils.cpu_resource_utils import (
    LogicalCPUInfo,
    get_allowed_cpu_list,
    get_visible_memory_node,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO = "auto"


def bind_mask(
    workers: int, local_dp_rank: int | None, nodes: Sequence[int] | None
) -> str:
    """The value that ``VLLM_CPU_OMP_THREADS_BIND`` stands for on this machine.

    Args:
        workers: worker processes of one data-parallel replica on this machine.
        local_dp_rank: which replica on this machine, None or 0 for the first.
        nodes: NUMA nodes assigned to it; None for all that are visible.

    Returns the user's own setting if there is one, and upstream's ``auto`` where it
    works; otherwise core lists, ``0,1|2,3``, one for each worker of each replica up
    to this one, since the reader takes its own part out of the whole.

    """
    setting = envs.VLLM_CPU_OMP_THREADS_BIND
    visible = get_visible_memory_node(nodes)
    if setting != AUTO or workers <= len(visible):
        return setting
    cores = one_per_core(get_allowed_cpu_list(), visible)
    return "|".join(core_lists(cores, workers) * ((local_dp_rank or 0) + 1))


def one_per_core(cpus: Sequence[LogicalCPUInfo], nodes: Sequence[int]) -> list[int]:
    """One logical CPU of every physical core on ``nodes``, in order.

    Two threads of one core share its vector units, so a second one only waits.
    """
    first: dict[tuple[int, int], int] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        if cpu.numa_node in nodes:
            first.setdefault((cpu.numa_node, cpu.physical_core), cpu.id)
    return sorted(first.values())


def core_lists(cores: Sequence[int], workers: int) -> list[str]:
    """Split cores into ``workers`` runs, or deal them out in turn if they are too few.

    Cores left over by the division stay free for the engine and the server.  Workers
    that share a core compute on one thread each: with a thread on every core, those of
    waiting stages spin against the one at work (three stages on two cores, 8 layers:
    256 ms a token against 32).
    """
    share = len(cores) // workers
    if share == 0:
        return [str(cores[i % len(cores)]) for i in range(workers)]
    runs = (cores[i * share : (i + 1) * share] for i in range(workers))
    return [",".join(map(str, run)) for run in runs]


def memory_fraction(vllm_config: "VllmConfig") -> float:
    """The part of a NUMA node's memory that one worker may reserve.

    That is ``--gpu-memory-utilization`` where a worker has a node to itself, and an
    equal part of it where workers share one: three stages that each reserve 0.92 of
    the same memory would plan 2.76 times what there is.
    """
    parallel = vllm_config.parallel_config
    nodes = len(get_visible_memory_node(parallel.assigned_physical_gpu_ids))
    sharing = -(-parallel.local_world_size // max(1, nodes))
    return vllm_config.cache_config.gpu_memory_utilization / sharing
