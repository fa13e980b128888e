"""Settings that Ray's workers do not read are refused when the configuration is built, in one sentence."""

import pytest

from vllm.config import ParallelConfig
from vllm.v1.executor.ray_settings import RayRefused, check_ray_settings


def refusal(**settings) -> str:
    with pytest.raises(ValueError) as refused:
        ParallelConfig(distributed_executor_backend="ray", **settings)
    return str(refused.value)


def test_a_pipeline_is_accepted():
    assert ParallelConfig(distributed_executor_backend="ray", pipeline_parallel_size=3).use_ray


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"numa_bind": True}, ["numa_bind=True", "numactl"]),
        ({"enable_shm_tensor_arena": True}, ["enable_shm_tensor_arena=True", "leave it out"]),
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "set it to 1"]),
        ({"data_parallel_size": 2}, ["data_parallel_size=2", "set it to 1"]),
        ({"prefill_context_parallel_size": 2}, ["prefill_context_parallel_size=2", "set it to 1"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_is_named_with_its_value_and_the_way_out(settings, words):
    said = refusal(**settings)
    assert all(word in said for word in [*words, "--distributed-executor-backend ray"]), said


@pytest.mark.parametrize(
    "name, value", [("VLLM_GPU_NIC_PCIE_MAPPING", "0000:01:00.0=0000:02:00.0"), ("VLLM_RAY_PER_WORKER_GPUS", "0.5")]
)
def test_a_variable_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    said = refusal(pipeline_parallel_size=2)
    assert f"{name}={value}" in said and "unset it" in said


def test_nothing_is_refused_without_ray(monkeypatch):
    monkeypatch.setenv("VLLM_RAY_PER_WORKER_GPUS", "0.5")
    check_ray_settings(ParallelConfig(distributed_executor_backend="mp", tensor_parallel_size=2))


def test_a_refusal_is_a_value_error():
    """Which is what the command line turns into a message instead of a traceback."""
    assert issubclass(RayRefused, ValueError)
