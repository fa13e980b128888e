"""The pipeline handler orders against the stream that the thread computes on.

No GPU: torch's three stream functions are replaced by stand-ins that keep a thread's current stream as torch does.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.v1.worker.gpu import pp_utils


class Stream:
    numbers = itertools.count()

    def __init__(self, device=None):
        self.number = next(self.numbers)
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.fixture
def streams(monkeypatch):
    """A thread on torch's default stream, which nothing of vLLM has moved yet."""
    thread = SimpleNamespace(current=Stream())

    def set_stream(stream):
        # vLLM replaces torch.cuda.set_stream by a function that does both.
        thread.current = stream
        torch_utils._current_stream_tls.value = stream

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: thread.current)
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", None, raising=False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    group = SimpleNamespace(
        is_last_rank=True, last_rank=1, world_size=2, make_sibling_device_group=lambda group_desc: None
    )
    monkeypatch.setattr(pp_utils, "get_pp_group", lambda: group)
    return thread


def test_it_keeps_the_stream_that_vllm_settles_on(streams):
    """Without the edit the handler keeps the default stream, and the thread leaves it afterwards."""
    default = streams.current
    handler = pp_utils.PPHandler(max_num_reqs=4, num_speculative_steps=0, device=torch.device("cuda"))
    computes_on = torch_utils.current_stream()
    assert handler.main_stream is computes_on is streams.current
    assert handler.main_stream is not default


def test_a_stream_that_is_settled_already_stays(streams):
    """What PyNccl does where it is available: nothing changes."""
    settled = torch_utils.current_stream()
    handler = pp_utils.PPHandler(max_num_reqs=4, num_speculative_steps=0, device=torch.device("cuda"))
    assert handler.main_stream is settled
    assert settled.waited_for, "the settled stream follows the work of the one it replaced"
