"""Activations are received when they are first looked at, once, and completely."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors, Worker
from vllm.v1.worker.late_receive import receive_late

HIDDEN = torch.arange(6.0)


class Group:
    """Receives one half into the dictionary, and the other by what has to be done after the transfer."""

    is_first_rank, is_last_rank = False, True

    def __init__(self):
        self.log = []

    def irecv_tensor_dict(self, all_gather_group):
        self.log.append("posted")
        tensors = {"hidden": HIDDEN}

        def gather():
            assert self.log[-1] == "waited", "gathered before the transfer was complete"
            self.log.append("gathered")
            tensors["residual"] = HIDDEN + 1

        return tensors, [SimpleNamespace(wait=lambda: self.log.append("waited"))], [gather]


def config(on=True):
    return SimpleNamespace(additional_config={} if on else {"late_receive": False})


def tensors(group, on=True):
    received, handles, postprocess = receive_late(config(on), group, all_gather_group=None)
    return AsyncIntermediateTensors(received, comm_handles=handles, comm_postprocess=postprocess)


def test_at_the_first_access_and_only_then():
    group = Group()
    made = tensors(group)
    assert not group.log
    assert set(made.tensors) == {"hidden", "residual"}
    assert group.log == ["posted", "waited", "gathered"]
    torch.testing.assert_close(made.tensors["residual"], HIDDEN + 1)
    assert len(group.log) == 3


def test_switched_off_it_is_upstreams():
    group = Group()
    made = tensors(group, on=False)
    assert group.log == ["posted"]
    assert set(made.tensors) == {"hidden", "residual"}


@pytest.mark.parametrize("on, expected", [(True, ["prepared", "posted"]), (False, ["posted", "prepared"])])
def test_a_worker_prepares_first(monkeypatch, on, expected):
    group = Group()
    monkeypatch.setattr(gpu_worker, "get_pp_group", lambda: group)
    monkeypatch.setattr(gpu_worker, "get_tp_group", lambda: None)

    def run(output, intermediate_tensors):
        group.log.append("prepared")
        assert set(intermediate_tensors.tensors) == {"hidden", "residual"}

    worker = Worker.__new__(Worker)
    worker.vllm_config, worker.use_v2_model_runner = config(on), True
    worker._pp_send_work, worker.profiler = [], None
    worker.model_runner = SimpleNamespace(execute_model=run, is_pooling_model=False)
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
    assert group.log[:2] == expected
