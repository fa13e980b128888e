"""Which cores the workers of one machine are bound to."""

import os
from types import SimpleNamespace

import pytest

from vllm.utils import stage_cpus
from vllm.utils.cpu_resource_utils import LogicalCPUInfo
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM


def machine(cores: int, nodes: int = 1, threads: int = 2) -> list[LogicalCPUInfo]:
    """Threads of one core are ``cores`` apart, as Linux numbers them."""
    return [
        LogicalCPUInfo(id=thread * cores + core, physical_core=core, numa_node=core * nodes // cores)
        for thread in range(threads)
        for core in range(cores)
    ]


@pytest.fixture(autouse=True)
def threads_unset(monkeypatch):
    """Nobody has set a number of threads, and what a test sets ends with it."""
    for name in ("OMP_NUM_THREADS", OMP_NUM_THREADS_SET_BY_VLLM):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def on(monkeypatch):
    def set_machine(cpus, setting=None):
        nodes = sorted({cpu.numa_node for cpu in cpus})
        monkeypatch.setattr(stage_cpus, "get_allowed_cpu_list", lambda: cpus)
        monkeypatch.setattr(stage_cpus, "get_visible_memory_node", lambda assigned: assigned or nodes)
        if setting is None:
            monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
        else:
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", setting)

    return set_machine


@pytest.mark.parametrize(
    "cores, workers, want",
    [
        (2, 2, "0|1"),
        (8, 3, "0,1|2,3|4,5"),
        (6, 6, "0|1|2|3|4|5"),
    ],
)
def test_one_node_is_shared_out(on, cores, workers, want):
    on(machine(cores))
    assert stage_cpus.bind_mask(workers, None, None) == want
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("cores, workers", [(2, 3), (1, 2)])
def test_too_few_cores_bind_nobody(on, cores, workers):
    on(machine(cores))
    assert stage_cpus.bind_mask(workers, None, None) == "nobind"
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("by_vllm, want", [("", "4"), ("1", "1")])
def test_the_users_number_of_threads_stays(on, monkeypatch, by_vllm, want):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv(OMP_NUM_THREADS_SET_BY_VLLM, by_vllm)
    on(machine(2))
    stage_cpus.bind_mask(3, None, None)
    assert os.environ["OMP_NUM_THREADS"] == want


def test_two_nodes_hold_three_stages(on):
    on(machine(6, nodes=2))
    assert stage_cpus.bind_mask(3, None, None) == "0,1|2,3|4,5"


def test_only_cores_of_assigned_nodes_are_used(on):
    on(machine(8, nodes=2))
    assert stage_cpus.bind_mask(2, None, [1]) == "4,5|6,7"


def test_a_replica_finds_its_own_part(on):
    """The reader takes entries rank * workers onwards out of the whole."""
    on(machine(4))
    mask = stage_cpus.bind_mask(2, 2, None).split("|")
    assert mask[4:6] == ["0,1", "2,3"]


def test_upstreams_choice_stays_where_it_works(on):
    on(machine(8, nodes=2))
    assert stage_cpus.bind_mask(2, None, None) == "auto"
    assert stage_cpus.bind_mask(1, None, None) == "auto"


@pytest.mark.parametrize("setting", ["nobind", "0|0|1"])
def test_the_users_setting_wins(on, setting):
    on(machine(2), setting)
    assert stage_cpus.bind_mask(3, None, None) == setting


def manager(workers: int) -> OMPProcessManager:
    parallel = SimpleNamespace(
        local_world_size=workers, data_parallel_rank_local=0, assigned_physical_gpu_ids=None, _api_process_count=1
    )
    return OMPProcessManager(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))


@pytest.mark.parametrize("cores, workers, threads", [(4, 2, "2"), (3, 3, "1"), (2, 3, "1")])
def test_the_manager_starts_workers_on_one_node(on, cores, workers, threads):
    """Upstream's own reader accepts the setting; it asserted before."""
    on(machine(cores))
    made = manager(workers)
    assert len(made.cpu_lists) == (workers if cores >= workers else 0) and all(made.cpu_lists)
    for rank in range(workers):
        with made.configure_omp_envs(rank=rank, local_rank=rank):
            assert os.environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("nodes, workers, want", [(1, 1, 0.9), (1, 3, 0.3), (2, 2, 0.9), (2, 3, 0.45)])
def test_workers_on_one_node_share_its_memory(on, nodes, workers, want):
    on(machine(8, nodes=nodes))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(local_world_size=workers, assigned_physical_gpu_ids=None),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
    )
    assert stage_cpus.memory_fraction(config) == pytest.approx(want)
