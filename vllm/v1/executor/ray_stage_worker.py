# SPDX-License-Identifier: Apache-2.0
"""A stage in a Ray actor, with what the multiprocessing executor does around the start of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import ray

from vllm import envs
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils import stage_cpus
from vllm.utils.watch_dog import start_watch_dog
from vllm.v1.executor import stage_sentry
from vllm.v1.executor.ray_environment import choose_interface, take_partition
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.executor.stage_pulse import INTERVAL

logger = init_logger(__name__)


class StageWorkerProc(RayWorkerProc):
    """Upstream's actor, watched on its own machine and, on the CPU, with its share of that machine."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        config = arguments["vllm_config"]
        # Before anything is loaded: a machine can hang while it reads weights, too.
        post_sentry(config.watchdog_config.silence_limit)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """(Ray node, its GPUs of this actor); on the CPU (machine, [rank]).

        The executor makes of it, for each actor, its place among the actors of one node and the list of all that was
        found there.  On the CPU there is nothing to hand out, but cores and memory are to be shared by those who are
        on one machine, which several Ray nodes can be; what comes back is therefore the ranks that share one.
        """
        if not current_platform.is_cpu():
            return super().get_node_and_physical_gpu_ids()
        return stage_cpus.machine(), [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        variables: dict[str, str],
        rendezvous: str,
        server_variables: dict[str, str],
        *,
        assigned_physical_gpu_ids: list[int],
    ) -> None:
        """Load the model; called by the executor with what it made of get_node_and_physical_gpu_ids.

        Args:
            local_rank: this worker's place among those of its node, on the CPU of its machine
            variables: of the environment, to be set whatever is set here
            rendezvous: where the ranks of all stages meet, tcp://address:port
            server_variables: the server's whole environment, for what is not set here
            assigned_physical_gpu_ids: of all workers of this node; on the CPU their ranks
        """
        take_partition(os.environ, server_variables)
        addresses = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
        choose_interface(os.environ, server_variables, ray.util.get_node_ip_address(), addresses)
        ids: list[int] | None = assigned_physical_gpu_ids
        if current_platform.is_cpu():
            for name, value in server_variables.items():
                # Upstream does this too, but after the cores are chosen by one of them.
                os.environ.setdefault(name, value)
            stage_cpus.take_share(self._init_kwargs["vllm_config"], local_rank, len(assigned_physical_gpu_ids))
            ids = None
        super().initialize_worker(local_rank, variables, rendezvous, server_variables, ids)

    def run(self) -> None:
        name_process()
        drop_name(self.worker_response_mq)
        config = self._init_kwargs["vllm_config"]
        start_watch_dog(f"worker_{self.rank}", config.watchdog_config, logger)
        super().run()


def name_process() -> None:
    """Let `ps` tell the stages, as it does where vLLM starts them.

    Ray names its process after each call that runs in it, and this one runs for good.  The package that vLLM names
    processes with has no effect in a process that Ray has named before.
    """
    parts = [
        f"_{kind}{group.rank_in_group}"
        for kind, group in (("PP", get_pp_group()), ("TP", get_tp_group()))
        if group.world_size > 1
    ]
    # Not public: should it move, stages keep Ray's name.
    with suppress(AttributeError):
        ray._raylet.setproctitle(f"{envs.VLLM_PROCESS_NAME_PREFIX}::Worker{''.join(parts)}")


def drop_name(queue: Any) -> None:
    """Remove the name of the queue's shared memory; its one reader, the engine, has mapped it before `run` is called.

    The memory goes with the last process that has it mapped.  A name goes when its maker ends in good order or, after a
    kill, by a helper process of the maker's, and Ray kills that helper, too: each killed server left 250 MB of names.
    """
    if queue.buffer is not None:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False


def post_sentry(limit: float) -> None:
    """Start the process that ends this one after `limit` seconds of silence; 0 for none."""
    if not limit:
        return
    sentry = subprocess.Popen(
        # -I: its folder holds modules of vLLM, which it must not import by accident.
        [sys.executable, "-I", stage_sentry.__file__, str(os.getpid()), str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert sentry.stdin is not None
    threading.Thread(target=_beat, args=(sentry.stdin.fileno(), sentry), daemon=True, name="StagePulse").start()


def _beat(pipe: int, sentry: subprocess.Popen) -> None:
    """Send a byte twice a second.  `sentry` is held because its end would close the pipe."""
    while sentry.poll() is None:
        try:
            os.write(pipe, b".")
        except OSError:
            break
        time.sleep(INTERVAL)
    logger.warning("The sentry of this stage is gone: a hang will be noticed late.")
