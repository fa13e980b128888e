"""The recommended --kv-cache-memory, from upstream's own worker methods on stand-ins for the GPU.

The figures are those of a 24 GB card with a stage of 16 layers; what matters is that each is counted once.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.worker import gpu_worker, stage_buffers, stage_kv_memory
from vllm.v1.worker.gpu_worker import Worker

MIB = 1 << 20
FREE = 23_900 * MIB
REQUESTED = 22_000 * MIB
WEIGHTS = 17_000 * MIB
ACTIVATIONS = 700 * MIB
ESTIMATED_GRAPHS = 1_200 * MIB
GRAPHS = 900 * MIB
# What upstream keeps back for its own error.
BUFFER = 150 * MIB


class Recommended(Exception):
    """Ends start-up where the recommendation is stored; `args` holds its bytes."""


class Platform(SimpleNamespace):
    def is_cuda_alike(self):
        return True

    def is_xpu(self):
        return False


@pytest.fixture
def worker(monkeypatch):
    """A worker after loading its weights, on a GPU whose every measurement is one of the figures above."""
    profile = SimpleNamespace(
        total_consumed=WEIGHTS,
        transient_peak_headroom=ACTIVATIONS,
        non_kv_cache_memory=WEIGHTS + ACTIVATIONS,
        after_profile=SimpleNamespace(free_memory=FREE - WEIGHTS),
    )

    def store(worker, kv_cache_memory_bytes):
        raise Recommended(kv_cache_memory_bytes)

    monkeypatch.setattr(gpu_worker, "current_platform", Platform())
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda worker: None)
    monkeypatch.setattr(gpu_worker, "maybe_save_startup_plan", store)
    monkeypatch.setattr(gpu_worker, "memory_profiling", lambda *args, **kwargs: contextlib.nullcontext(profile))
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(gpu_worker, "maybe_rocm_profiling_fallback", lambda result: None)
    monkeypatch.setattr(gpu_worker, "reserve_mm_ipc_gpu_memory", lambda available, *args: available)
    monkeypatch.setattr(gpu_worker, "kernel_warmup", lambda worker: None)
    alone = SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(stage_kv_memory, "get_pp_group", lambda: alone)
    monkeypatch.setattr(stage_buffers, "get_pp_group", lambda: alone)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_mm_encoder=False, mode=CompilationMode.NONE
    )
    runner = SimpleNamespace(
        model_memory_usage=WEIGHTS,
        profile_run=lambda randomize_inputs: None,
        profile_cudagraph_memory=lambda: ESTIMATED_GRAPHS,
        capture_model=lambda: GRAPHS,
        maybe_remove_all_loras=lambda config: None,
        lora_config=None,
    )
    return SimpleNamespace(
        init_snapshot=SimpleNamespace(free_memory=FREE, total_memory=24_000 * MIB),
        requested_memory=REQUESTED,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.92),
        vllm_config=SimpleNamespace(
            compilation_config=compilation, kernel_config=SimpleNamespace(enable_jit_warmup=False)
        ),
        model_config=SimpleNamespace(enforce_eager=False, multimodal_config=None),
        parallel_config=SimpleNamespace(),
        model_runner=runner,
        use_v2_model_runner=True,
        randomize_dummy_inputs=False,
        _scoped_allocator_max_split=lambda max_split_size_mb: contextlib.nullcontext(),
        _get_cudagraph_capture_context=contextlib.nullcontext,
    )


def recommendation(worker) -> int:
    with pytest.raises(Recommended) as stored:
        Worker._compile_or_warm_up_model(worker)
    return stored.value.args[0]


@pytest.mark.parametrize("estimated", ["1", "0"])
def test_graphs_are_counted_once(worker, monkeypatch, estimated):
    """Without the edit the estimate is subtracted beside the measured size, if there is one."""
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", estimated)
    Worker.determine_available_memory(worker)
    assert recommendation(worker) == REQUESTED - WEIGHTS - ACTIVATIONS - GRAPHS - BUFFER


def test_the_pool_of_this_start_still_leaves_room_for_the_estimate(worker):
    assert Worker.determine_available_memory(worker) == REQUESTED - WEIGHTS - ACTIVATIONS - ESTIMATED_GRAPHS


def test_an_exact_estimate_recommends_the_pool_that_is_in_use(worker):
    """The property that double counting breaks: using the recommendation changes nothing but the buffer."""
    worker.model_runner.profile_cudagraph_memory = lambda: GRAPHS
    in_use = Worker.determine_available_memory(worker)
    assert recommendation(worker) == in_use - BUFFER


def test_large_graphs_leave_a_recommendation_that_can_be_used(worker):
    worker.model_runner.profile_cudagraph_memory = lambda: 3_000 * MIB
    worker.model_runner.capture_model = lambda: 3_000 * MIB
    Worker.determine_available_memory(worker)
    assert recommendation(worker) == 1_150 * MIB


@pytest.fixture
def other_stages(monkeypatch):
    """Two more stages, of which the last can give 1,100 MiB less within requested memory, and 900 MiB less of the GPU."""

    def gather(values, own, group):
        values[:] = [own, (own[0] + 50 * MIB, own[1] + 50 * MIB), (own[0] - 900 * MIB, own[1] - 1_100 * MIB)]

    stages = SimpleNamespace(world_size=3, is_first_rank=True, cpu_group="stages")
    monkeypatch.setattr(stage_kv_memory, "get_pp_group", lambda: stages)
    monkeypatch.setattr(stage_kv_memory.torch.distributed, "all_gather_object", gather)


def test_all_stages_recommend_what_the_fullest_can_give(worker, other_stages, monkeypatch):
    """--kv-cache-memory is one value for all of them."""
    said = []
    monkeypatch.setattr(stage_kv_memory, "logger", SimpleNamespace(info=lambda text, *args: said.append(text % args)))
    Worker.determine_available_memory(worker)
    assert recommendation(worker) == REQUESTED - WEIGHTS - ACTIVATIONS - GRAPHS - BUFFER - 1_100 * MIB
    (line,) = said
    assert "stage 2 can give" in line and "3.17, 3.22, 2.1 GiB" in line


def test_both_limits_are_those_of_all_stages(worker, other_stages, monkeypatch):
    said = []
    monkeypatch.setattr(
        gpu_worker, "logger", SimpleNamespace(info=lambda *args: said.append(args[0]), info_once=print, debug=print)
    )
    Worker.determine_available_memory(worker)
    within_requested = recommendation(worker)
    of_the_gpu = FREE - WEIGHTS - ACTIVATIONS - GRAPHS - BUFFER - 900 * MIB
    assert f"--kv-cache-memory={within_requested}`" in said[-1] and f"--kv-cache-memory={of_the_gpu}`" in said[-1]


def test_a_stored_plan_stays_the_stages_own(worker, other_stages, monkeypatch):
    """A stage that starts from its plan does not take part in an exchange."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    Worker.determine_available_memory(worker)
    assert recommendation(worker) == REQUESTED - WEIGHTS - ACTIVATIONS - GRAPHS - BUFFER
