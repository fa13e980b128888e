# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on the machines of a Ray cluster.

Upstream's Ray executor reserves places, starts a worker in each and watches them.  This one looks at the machines
first, says which stage is where, starts workers that are watched on their own machine, and places stages on machines
without GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from vllm import envs
from vllm.config import ParallelConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor import ray_machines
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.ray_machines import Seat
from vllm.v1.executor.ray_stage_worker import StageWorkerProc
from vllm.v1.executor.ray_utils import (
    _wait_until_pg_ready,
    get_bundles_for_indices,
    get_bundles_sorted_by_node,
    initialize_ray_cluster,
)
from vllm.v1.metrics import ngram_table_relay

logger = init_logger(__name__)


class RayStagesExecutor(RayExecutorV2):
    """What `--distributed-executor-backend ray` stands for."""

    worker_proc = StageWorkerProc

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        reserve(parallel)
        seats = seats_of(parallel)
        folder = ray_machines.checkpoint_folder(self.model_config.model)
        machines = ray_machines.survey(seats, folder)
        logger.info("Ray: %s", ray_machines.describe(machines, seats, parallel.pipeline_parallel_size))
        ray_machines.check(machines, ray_machines.here(folder), folder)
        if (engram := self.vllm_config.engram_config) is not None and engram.host_file_gather:
            ngram_table_relay.listen(ray.util.get_node_ip_address())
        super()._init_executor()
        if current_platform.is_cpu():
            # Ranks, not NUMA nodes; see StageWorkerProc.get_node_and_physical_gpu_ids.
            parallel.assigned_physical_gpu_ids = None

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        """A place on a machine without GPUs is not a resource that an actor takes away again: it has the bundle."""
        return {} if current_platform.is_cpu() else RayExecutorV2._get_actor_resource_kwargs()


def reserve(parallel: ParallelConfig) -> None:
    """Connect to the cluster and reserve a place for each worker, in `parallel.placement_group`.

    On GPUs as upstream does: as few machines as have the GPUs.  On the CPU a machine is what a stage has to itself, so
    stages are spread over as many machines as there are.
    """
    if current_platform.is_cpu():
        if not ray.is_initialized():
            # As upstream does for the other platforms: where Ray is started here, it reports nothing to its makers.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(runtime_env=parallel.ray_runtime_env)
        if parallel.placement_group is None and ray.util.get_current_placement_group() is None:
            group = ray.util.placement_group(
                [{current_platform.ray_device_key: 1.0}] * parallel.world_size, strategy="SPREAD"
            )
            _wait_until_pg_ready(group)
            parallel.placement_group = group
    initialize_ray_cluster(parallel)


def seats_of(parallel: ParallelConfig) -> list[Seat]:
    """The reserved places in the order of the ranks, as the executor will choose them."""
    group = parallel.placement_group
    if envs.VLLM_RAY_BUNDLE_INDICES:
        indices = [int(index) for index in envs.VLLM_RAY_BUNDLE_INDICES.split(",")]
        bundles = get_bundles_for_indices(group, indices, parallel.world_size)
    else:
        bundles = get_bundles_sorted_by_node(group)
    return [Seat(*bundle) for bundle in bundles[: parallel.world_size]]
