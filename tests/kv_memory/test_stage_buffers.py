"""A stage is profiled beside the activations that it holds while it serves. No GPU: stand-ins."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.sequence import IntermediateTensors
from vllm.v1.worker import gpu_worker, stage_buffers
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.stage_buffers import profile_stage

TOKENS, WIDTH = 8, 5


class Runner:
    """Counts the buffers that are alive while it is profiled."""

    max_num_tokens, device, model_config = TOKENS, "cpu", SimpleNamespace(dtype=torch.bfloat16)

    def __init__(self) -> None:
        self.model = self
        self.made: list[weakref.ref] = []
        self.alive: list[tuple[int, ...]] = []
        self.arguments: dict = {}

    def make_empty_intermediate_tensors(self, batch_size, dtype, device) -> IntermediateTensors:
        tensor = torch.empty(batch_size, WIDTH, dtype=dtype, device=device)
        self.made.append(weakref.ref(tensor))
        return IntermediateTensors({"hidden_states": tensor})

    def profile_run(self, **arguments) -> None:
        gc.collect()
        self.alive = [tuple(tensor().shape) for tensor in self.made if tensor() is not None]
        self.arguments = arguments


@pytest.mark.parametrize(
    ("first", "last", "buffers"), [(True, True, 0), (True, False, 1), (False, False, 2), (False, True, 1)]
)
def test_what_a_stage_holds(monkeypatch, first, last, buffers):
    monkeypatch.setattr(stage_buffers, "get_pp_group", lambda: SimpleNamespace(is_first_rank=first, is_last_rank=last))
    runner = Runner()
    profile_stage(runner, randomize_inputs=True)
    assert runner.alive == [(TOKENS, WIDTH)] * buffers
    assert runner.arguments == {"randomize_inputs": True}
    gc.collect()
    assert [tensor() for tensor in runner.made] == [None] * buffers, "kept for good, and so taken from the pool twice"


def test_a_step_does_hold_both(monkeypatch):
    """Upstream's worker and group: during a forward, what came for it, and what was sent in the step before."""
    alive: dict[str, weakref.ref] = {}
    group = GroupCoordinator.__new__(GroupCoordinator)
    group.world_size, group.rank_in_group, group.ranks, group.rank = 3, 1, [0, 1, 2], 1
    group.use_cpu_custom_send_recv, group.cpu_group, group.device_group = False, None, None

    def receive(all_gather_group):
        tensor = torch.ones(TOKENS, WIDTH)
        alive["received"] = weakref.ref(tensor)
        return {"hidden_states": tensor}, [], []

    work = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, dst, group: work)
    monkeypatch.setattr(group, "irecv_tensor_dict", receive)
    monkeypatch.setattr(gpu_worker, "get_pp_group", lambda: group)
    monkeypatch.setattr(gpu_worker, "get_tp_group", lambda: None)
    seen = []

    def forward(output, intermediate_tensors):
        read = intermediate_tensors.tensors["hidden_states"] + 0  # the copy of fixed address
        del intermediate_tensors
        gc.collect()
        seen.append({name for name, tensor in alive.items() if tensor() is not None})
        alive["sent"] = weakref.ref(read)
        return IntermediateTensors({"hidden_states": read})

    worker = Worker.__new__(Worker)
    worker.vllm_config = SimpleNamespace(
        additional_config={}, parallel_config=SimpleNamespace(distributed_executor_backend="mp")
    )
    worker.use_v2_model_runner, worker.profiler, worker._pp_send_work = True, None, []
    worker.model_runner = SimpleNamespace(execute_model=forward, is_pooling_model=False)
    for _ in range(3):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=TOKENS))
    assert seen == [{"received"}, {"received", "sent"}, {"received", "sent"}]


def test_the_profile_of_a_worker_holds_them(monkeypatch):
    """The hook: inside the block that measures, and not where the size of the pool is given."""
    told = []
    monkeypatch.setattr(stage_buffers, "profile_stage", lambda runner, **arguments: told.append((runner, arguments)))
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda worker: None)
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: _Block([], None))
    monkeypatch.setattr(gpu_worker, "reserve_mm_ipc_gpu_memory", lambda available, *args: available)
    measured: list[str] = []
    monkeypatch.setattr(gpu_worker, "memory_profiling", lambda *args, **kwargs: _Block(measured, told))
    runner = SimpleNamespace(model_memory_usage=0, profile_run=lambda randomize_inputs: measured.append("upstream's"))
    worker = SimpleNamespace(
        init_snapshot=None,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        vllm_config=None,
        model_runner=runner,
        randomize_dummy_inputs=False,
        _scoped_allocator_max_split=lambda max_split_size_mb: _Block([], None),
    )
    with pytest.raises(_Measured):
        Worker.determine_available_memory(worker)
    assert told == [(runner, {"randomize_inputs": False})] and not measured


class _Measured(Exception):
    """Ends the method where the peak is read."""


class _Block:
    def __init__(self, measured, told):
        self.measured, self.told = measured, told

    def __enter__(self):
        assert not self.told, "profiled before anything is measured"

    def __exit__(self, *raised):
        if self.told is not None:
            raise _Measured
