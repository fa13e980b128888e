"""Pinned memory of exact size, with a CUDA runtime that only says what it was asked."""

import gc
import resource
from types import SimpleNamespace

import pytest
import torch

from vllm.config import EngramConfig
from vllm.models.qwen4_exp.common import ngram_embedding as upstream
from vllm.models.qwen4_exp.ple_store import pinned
from vllm.models.qwen4_exp.ple_store.embedding import choose_embedding
from vllm.models.qwen4_exp.ple_store.errors import TableNotPinned
from vllm.models.qwen4_exp.ple_store.pinned import Qwen4ExpPLEExactPinnedEmbedding, page_locked
from vllm.utils import free_memory


class Runtime:
    """torch.cuda.cudart(), as far as it is used."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.held = answer, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if self.answer == 0:
            self.held[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_exactly_as_many_bytes_as_the_table_has(dtype):
    runtime = Runtime()
    tensor = page_locked((12345, 7), dtype, runtime)
    assert runtime.held == {tensor.data_ptr(): 12345 * 7 * dtype.itemsize}
    assert tensor.shape == (12345, 7) and tensor.dtype is dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % 4096 == 0
    tensor.view(torch.uint8).fill_(3)


def test_released_with_the_last_view():
    runtime = Runtime()
    tensor = page_locked((100, 8), torch.float32, runtime)
    view = torch.nn.Parameter(tensor[10:20], requires_grad=False)
    del tensor
    gc.collect()
    assert runtime.held
    view.data.zero_()
    del view
    gc.collect()
    assert not runtime.held


def test_a_refusal_says_what_was_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    with pytest.raises(TableNotPinned, match=r"found 2, with at most 0.01 GiB locked \(ulimit -l\).*host_file_gather"):
        page_locked((100, 8), torch.float32, Runtime(answer=2))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with pytest.raises(TableNotPinned, match="no limit of locked memory"):
        page_locked((100, 8), torch.float32, Runtime(answer=2))


def test_too_little_memory_is_refused_before_it_is_touched(monkeypatch):
    monkeypatch.setattr(pinned, "available_bytes", lambda: 95 << 30)
    runtime = Runtime()
    with pytest.raises(TableNotPinned, match=r"95.4 GiB: expected as much memory, found 95.0 GiB available"):
        page_locked((320_001_536, 160), torch.bfloat16, runtime)
    assert not runtime.held


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    """The machine has the memory, the container has not: whoever takes it there is killed and says nothing."""
    limit, used, stat = (tmp_path / name for name in ("max", "current", "stat"))
    limit.write_text(str(3 << 30)), used.write_text(str(1 << 30)), stat.write_text("inactive_file 0\n")
    monkeypatch.setattr(free_memory, "_CGROUPS", [(limit, used, stat)])
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=128 << 30))
    with pytest.raises(TableNotPinned, match=r"2.5 GiB: expected as much memory, found 2.0 GiB available"):
        page_locked((5 << 28, 1), torch.bfloat16, Runtime())


def test_the_layer_takes_it(monkeypatch):
    asked = []
    monkeypatch.setattr(pinned, "page_locked", lambda *a: asked.append(a) or "memory")
    layer = Qwen4ExpPLEExactPinnedEmbedding.__new__(Qwen4ExpPLEExactPinnedEmbedding)
    assert layer.allocate_embedding_weight(9, 16, torch.float16) == "memory" and asked == [((9, 16), torch.float16)]
    assert choose_embedding(EngramConfig()) is Qwen4ExpPLEExactPinnedEmbedding
    assert choose_embedding(EngramConfig(cpu_offload=False)) is upstream.Qwen4ExpPLEDeviceEmbedding
