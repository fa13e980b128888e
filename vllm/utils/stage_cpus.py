# SPDX-License-Identifier: Apache-2.0
"""Cores and memory of the workers of one machine, when it has fewer NUMA nodes.

Upstream binds each worker to a NUMA node of its own and stops where there are fewer
nodes than workers: every pipeline on an ordinary desktop.  Here the workers then get
the cores of the nodes that there are, in equal runs, or are bound to none and compute
on one thread each where there are fewer cores than workers; and they share the node's
memory.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from vllm import envs
from vllm.utils.cpu_resource_utils import (
    LogicalCPUInfo,
    get_allowed_cpu_list,
    get_visible_memory_node,
)
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO = "auto"
NOBIND = "nobind"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: Workers on this machine, where that is not the configuration's ``local_world_size``: under Ray, which
#: knows only after placing them.  Set once, in a worker.
_workers_here: int | None = None


class CoreListsDoNotFit(ValueError):
    """``VLLM_CPU_OMP_THREADS_BIND`` has another number of lists than this machine has stages."""


def bind_mask(workers: int, local_dp_rank: int | None, nodes: Sequence[int] | None) -> str:
    """The value that ``VLLM_CPU_OMP_THREADS_BIND`` stands for on this machine.

    Args:
        workers: worker processes of one data-parallel replica on this machine.
        local_dp_rank: which replica on this machine, None or 0 for the first.
        nodes: NUMA nodes assigned to it; None for all that are visible.

    Returns the user's own setting if there is one, and upstream's ``auto`` where it
    works; otherwise core lists, ``0,1|2,3``, one for each worker of each replica up
    to this one, since the reader takes its own part out of the whole; or ``nobind``
    where cores are too few, for workers that find ``OMP_NUM_THREADS`` to be 1: this
    sets it in the environment that they inherit, unless the user did.

    """
    setting = envs.VLLM_CPU_OMP_THREADS_BIND
    visible = get_visible_memory_node(nodes)
    if setting != AUTO or workers <= len(visible):
        return setting
    cores = one_per_core(get_allowed_cpu_list(), visible)
    if len(cores) < workers:
        _one_thread_each()
        return NOBIND
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
    """Split cores into ``workers`` runs.

    Cores left over by the division stay free for the engine and the server.
    """
    share = len(cores) // workers
    runs = (cores[i * share : (i + 1) * share] for i in range(workers))
    return [",".join(map(str, run)) for run in runs]


def _one_thread_each() -> None:
    """For workers that share cores.

    With a thread on every core, those of waiting stages spin against the one at work (three stages on two cores, 8
    layers: 256 ms a token against 32).  Bound to a core each, two that got the same one start one after the other: the
    workers of three stages on two cores took 18 s to import, and 13 s unbound.
    """
    if "OMP_NUM_THREADS" not in os.environ or os.environ.get(OMP_NUM_THREADS_SET_BY_VLLM) == "1":
        os.environ |= {"OMP_NUM_THREADS": "1", OMP_NUM_THREADS_SET_BY_VLLM: "1"}


def memory_fraction(vllm_config: "VllmConfig") -> float:
    """The part of a NUMA node's memory that one worker may reserve.

    That is ``--gpu-memory-utilization`` where a worker has a node to itself, and an
    equal part of it where workers share one: three stages that each reserve 0.92 of
    the same memory would plan 2.76 times what there is.
    """
    parallel = vllm_config.parallel_config
    nodes = len(get_visible_memory_node(parallel.assigned_physical_gpu_ids))
    sharing = -(-(_workers_here or parallel.local_world_size) // max(1, nodes))
    return vllm_config.cache_config.gpu_memory_utilization / sharing


def machine() -> str:
    """Equal for two processes that have the same cores: of one machine, and of one set of CPUs where containers have sets."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else os.uname().nodename
    cpus = sorted(os.sched_getaffinity(0))
    return hashlib.sha256(f"{boot} {cpus}".encode()).hexdigest()


def take_share(vllm_config: "VllmConfig", index: int, workers: int) -> list[int]:
    """Give this worker its cores and its part of the memory, in a process that somebody else started.

    A worker that vLLM starts finds both in its environment, where OpenMP reads them as it is loaded.  Under Ray it is
    loaded by then, so the calling thread, which is the one that computes, is bound and its threads are counted here;
    the threads that it starts later stay on the same cores.

    Args:
        index: which worker of this machine
        workers: how many there are

    Returns its cores.

    Raises:
        CoreListsDoNotFit: see there.
    """
    global _workers_here
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    setting = envs.VLLM_CPU_OMP_THREADS_BIND
    if setting not in (AUTO, NOBIND) and len(lists := setting.split("|")) != workers:
        raise CoreListsDoNotFit(
            f"VLLM_CPU_OMP_THREADS_BIND={setting} has {len(lists)} lists of cores and this machine ({os.uname().nodename}) "
            f"{workers} stages; set one list for each stage of this machine before `ray start` there"
        )
    parallel = vllm_config.parallel_config
    here = SimpleNamespace(
        local_world_size=workers,
        data_parallel_rank_local=None,
        assigned_physical_gpu_ids=parallel.assigned_physical_gpu_ids,
        _api_process_count=parallel._api_process_count,
    )
    manager = OMPProcessManager(
        SimpleNamespace(parallel_config=here, kv_transfer_config=vllm_config.kv_transfer_config)
    )
    _workers_here = workers
    cores = manager.cpu_lists[index] if manager.cpu_lists else sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    # Ray has set OMP_NUM_THREADS to 1, which is right for workers that share cores only.
    torch.set_num_threads(1 if setting == AUTO and manager.skip_setup else len(cores))
    return cores
