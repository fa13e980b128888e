"""What a stage does before and around upstream's worker, without a cluster."""

from types import SimpleNamespace

import pytest

from vllm.v1.executor import ray_stage_worker
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.executor.ray_stage_worker import StageWorkerProc, drop_name, post_sentry
from vllm.v1.executor.ray_stages import RayStagesExecutor


def test_ray_stands_for_our_executor():
    config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="ray"))
    assert Executor.get_class(config) is RayStagesExecutor
    assert RayStagesExecutor.worker_proc is StageWorkerProc


@pytest.fixture
def worker(monkeypatch):
    """A worker of rank 1 that stops where upstream would load the model; `calls` are upstream's arguments."""
    calls: list = []
    monkeypatch.setattr(RayWorkerProc, "initialize_worker", lambda self, *args: calls.append(args))
    monkeypatch.setattr(ray_stage_worker.ray.util, "get_node_ip_address", lambda: "203.0.113.1")
    shares: list = []
    monkeypatch.setattr(ray_stage_worker.stage_cpus, "take_share", lambda *args: shares.append(args[1:]))
    made = StageWorkerProc.__new__(StageWorkerProc)
    made._init_kwargs = {"vllm_config": SimpleNamespace(), "rank": 1}
    return made, calls, shares


def test_a_stage_takes_its_share_of_the_machine(worker, monkeypatch):
    made, calls, shares = worker
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    made.initialize_worker(1, {}, "tcp://a:1", {"HOME": "/elsewhere"}, assigned_physical_gpu_ids=[0, 1])
    assert shares == [(1, 2)]
    # On the CPU the ids were ranks; upstream takes ids for NUMA nodes there.
    assert calls == [(1, {}, "tcp://a:1", {"HOME": "/elsewhere"}, None)]


def test_workers_of_one_machine_say_so(worker):
    made, _, _ = worker
    machine, ranks = made.get_node_and_physical_gpu_ids()
    assert ranks == [1] and machine == made.get_node_and_physical_gpu_ids()[0]


def test_on_gpus_the_ids_are_rays(worker, monkeypatch):
    made, calls, shares = worker
    monkeypatch.setattr(ray_stage_worker.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(RayWorkerProc, "get_node_and_physical_gpu_ids", lambda self: ("node", [3]))
    assert made.get_node_and_physical_gpu_ids() == ("node", [3])
    made.initialize_worker(0, {}, "tcp://a:1", {}, assigned_physical_gpu_ids=[3])
    assert calls[0][-1] == [3] and not shares


def test_a_limit_of_zero_posts_no_sentry(monkeypatch):
    monkeypatch.setattr(ray_stage_worker.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("posted"))
    post_sentry(0)


def test_a_queue_loses_its_name_once():
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    buffer = ShmRingBuffer(1, 1024, 2)
    name = buffer.shared_memory.name
    drop_name(SimpleNamespace(buffer=buffer))
    reader = ShmRingBuffer(1, 1024, 2, name)
    assert not hasattr(reader, "shared_memory")
    del buffer


def test_a_queue_over_a_socket_has_no_name():
    drop_name(SimpleNamespace(buffer=None))
