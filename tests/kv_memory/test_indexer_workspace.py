"""The indexer's workspace stands in the memory profile, with the size that prompts allocate. No GPU: stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp import qsa_workspace
from vllm.models.qwen4_exp.nvidia import model  # before qsa: the two import each other
from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer
from vllm.models.qwen4_exp.qsa_workspace import VARIABLE, indexer_workspace_bytes

CONTEXT, RATIO = 262_144, 4


class Output:
    """The layer's output on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.zeroed = False

    def zero_(self) -> None:
        self.zeroed = True


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Bytes of every allocation that the module makes on a GPU."""
    sizes: list[int] = []

    def empty(size, dtype, device):
        assert (dtype, device.type) == (torch.uint8, "cuda")
        sizes.append(size)

    fake = SimpleNamespace(
        empty=empty, uint8=torch.uint8, cuda=SimpleNamespace(is_current_stream_capturing=lambda: False)
    )
    monkeypatch.setattr(qsa_workspace, "torch", fake)
    return sizes


def run_without_metadata(monkeypatch, device: str) -> Output:
    """Upstream's layer as the profiling pass calls it."""
    monkeypatch.setattr(
        "vllm.models.qwen4_exp.nvidia.qsa.get_forward_context", lambda: SimpleNamespace(attn_metadata=None)
    )
    layer = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=CONTEXT, indexer_compress_ratio=RATIO))
    output = Output(device)
    model.Qwen4ExpQSAAttention._run_qsa(layer, None, None, None, None, None, output, None, None)
    assert output.zeroed
    return output


def prompt_allocates(page_rows: int, pages: int) -> int:
    """Bytes of scores that upstream's prefill allocates for one short prompt; it is stopped there."""

    class Allocated(Exception):
        pass

    def new_empty(elements, dtype):
        raise Allocated(elements * dtype.itemsize)

    q = SimpleNamespace(shape=(3, 16, 128), dtype=torch.bfloat16, new_empty=new_empty)
    cache = SimpleNamespace(shape=(pages, page_rows, 1, 128), dtype=torch.bfloat16)
    table = SimpleNamespace(shape=(1, pages))
    with pytest.raises(Allocated) as allocated:
        qsa_indexer.qsa_select_paged_prefill(
            q, cache, table, None, None, 2048, RATIO, 3, torch.empty(3, 2048 // RATIO), 40
        )
    return allocated.value.args[0]


@pytest.mark.parametrize("megabytes", [None, "64", "0"])
def test_the_profile_takes_what_a_prompt_takes(monkeypatch, taken, megabytes):
    """0 leaves one row of scores, so a cache that is a whole number of pages is compared."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if megabytes is not None:
        monkeypatch.setenv(VARIABLE, megabytes)
    run_without_metadata(monkeypatch, "cuda")
    assert taken == [prompt_allocates(page_rows=256, pages=CONTEXT // RATIO // 256)]


def test_the_size_by_default():
    assert indexer_workspace_bytes(CONTEXT, RATIO) == 512 << 20


def test_one_row_of_a_longer_context(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert indexer_workspace_bytes(4 << 20, RATIO) == 4 << 20


def test_nothing_on_a_cpu(monkeypatch, taken):
    run_without_metadata(monkeypatch, "cpu")
    assert not taken


def test_nothing_under_capture(monkeypatch, taken):
    monkeypatch.setattr(qsa_workspace.torch.cuda, "is_current_stream_capturing", lambda: True)
    run_without_metadata(monkeypatch, "cuda")
    assert not taken
