"""Cores and memory of a worker in a process that vLLM did not start."""

import os
from types import SimpleNamespace

import pytest
import torch

from vllm.utils import stage_cpus
from vllm.utils.stage_cpus import CoreListsDoNotFit, machine, take_share


@pytest.fixture
def config(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    # As Ray starts its workers.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores, threads, here = os.sched_getaffinity(0), torch.get_num_threads(), stage_cpus._workers_here
    parallel = SimpleNamespace(local_world_size=9, assigned_physical_gpu_ids=None, _api_process_count=1)
    yield SimpleNamespace(
        parallel_config=parallel,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
    )
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    stage_cpus._workers_here = here


def test_two_stages_of_a_machine_have_different_cores(config):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    cores = os.sched_getaffinity(0)
    first = take_share(config, 0, 2)
    assert os.sched_getaffinity(0) == set(first) and torch.get_num_threads() == len(first)
    os.sched_setaffinity(0, cores)
    assert not set(first) & set(take_share(config, 1, 2))


def test_stages_that_share_cores_compute_on_a_thread_each(config):
    cores = os.sched_getaffinity(0)
    torch.set_num_threads(2)
    assert take_share(config, 0, len(cores) + 1) == sorted(cores)
    assert os.sched_getaffinity(0) == cores and torch.get_num_threads() == 1


def test_memory_is_shared_by_those_who_are_here(config):
    """The configuration counts all stages of the cluster: nine would leave a tenth for each."""
    take_share(config, 0, 1)
    assert stage_cpus.memory_fraction(config) == pytest.approx(0.9)


def test_lists_of_another_number_are_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with pytest.raises(
        CoreListsDoNotFit, match=r"VLLM_CPU_OMP_THREADS_BIND=0\|1 has 2 lists .* 1 stages; set one list"
    ):
        take_share(config, 0, 1)


def test_nobind_keeps_all_cores(config, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    cores = os.sched_getaffinity(0)
    assert take_share(config, 1, 2) == sorted(cores) and os.sched_getaffinity(0) == cores


def test_a_set_of_cpus_is_a_machine_of_its_own(config):
    """As containers with their own sets have it: nothing to share out between them."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    before = machine()
    assert before == machine()
    os.sched_setaffinity(0, cores[:1])
    assert machine() != before
