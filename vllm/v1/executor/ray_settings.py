# SPDX-License-Identifier: Apache-2.0
"""Settings that Ray's workers never read, or that cannot work over machines: refused before anything is started.

`--distributed-executor-backend ray` starts no worker process itself, so what the multiprocessing executor does around
such a start would be accepted and forgotten.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


class RayRefused(ValueError):
    """A setting that has no meaning under Ray; the message names it, its value and what to do."""

    def __init__(self, setting: str, value: object, reason: str, way_out: str):
        super().__init__(f"{setting}={value} {reason} under --distributed-executor-backend ray; {way_out}")


def check_ray_settings(parallel: ParallelConfig) -> None:
    """Called while the configuration is built, in every process.

    Raises:
        RayRefused: for the first setting that stands in the way.
    """
    if not parallel.use_ray:
        return
    if parallel.numa_bind:
        raise RayRefused(
            "numa_bind", True, "is applied where vLLM starts a worker, which Ray does", "start `ray` under numactl"
        )
    if parallel.enable_shm_tensor_arena:
        raise RayRefused(
            "enable_shm_tensor_arena", True, "needs all workers on one machine and is not read", "leave it out"
        )
    if mapping := os.environ.get("VLLM_GPU_NIC_PCIE_MAPPING"):
        raise RayRefused(
            "VLLM_GPU_NIC_PCIE_MAPPING",
            mapping,
            "is not read",
            "unset it and set NCCL_IB_HCA on each machine before `ray start`",
        )
    if current_platform.is_cpu():
        _check_cpu(parallel)


def _check_cpu(parallel: ParallelConfig) -> None:
    for setting in ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, setting)) > 1:
            raise RayRefused(
                setting, size, "is not supported on the CPU, where Ray spreads pipeline stages only", "set it to 1"
            )
    if share := os.environ.get("VLLM_RAY_PER_WORKER_GPUS"):
        raise RayRefused("VLLM_RAY_PER_WORKER_GPUS", share, "has no GPU to share on the CPU", "unset it")
