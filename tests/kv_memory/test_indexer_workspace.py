"""One buffer of scores for all layers and steps, in the memory profile. No GPU: stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp import qsa_workspace
from vllm.models.qwen4_exp.nvidia import model  # before qsa: the two import each other
from vllm.models.qwen4_exp.qsa import select
from vllm.models.qwen4_exp.qsa_workspace import VARIABLE, indexer_workspace, indexer_workspace_bytes

CONTEXT, RATIO, BUDGET = 262_144, 4, 2048
GPU = torch.device("cuda")


class Output:
    """The layer's output on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.zeroed = False

    def zero_(self) -> None:
        self.zeroed = True


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Bytes of every allocation that the module makes."""
    sizes: list[int] = []

    def empty(count, dtype, device):
        sizes.append(count * dtype.itemsize)
        return SimpleNamespace(numel=lambda: count)

    fake = SimpleNamespace(
        empty=empty, int32=torch.int32, cuda=SimpleNamespace(is_current_stream_capturing=lambda: False)
    )
    monkeypatch.setattr(qsa_workspace, "torch", fake)
    monkeypatch.setattr(qsa_workspace, "_buffers", {})
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


@pytest.mark.parametrize("megabytes, size", [(None, 64 << 20), ("128", 128 << 20), ("0", 2 * 4 * (CONTEXT // 4 + 256))])
def test_the_profile_takes_the_buffer_once(monkeypatch, taken, megabytes, size):
    """However many layers a worker has; 0 leaves room for one row."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if megabytes is not None:
        monkeypatch.setenv(VARIABLE, megabytes)
    for _ in range(3):
        run_without_metadata(monkeypatch, "cuda")
    assert taken == [size]


@pytest.mark.parametrize("megabytes", [None, "0"])
def test_every_batch_is_scored_in_that_buffer(monkeypatch, taken, megabytes):
    """Decodes and prompts of the longest context, and no allocation after the profile's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if megabytes is not None:
        monkeypatch.setenv(VARIABLE, megabytes)
    run_without_metadata(monkeypatch, "cuda")
    parts: list[tuple[int, int]] = []

    class Buffer:
        def __init__(self, count):
            self.count = count

        def numel(self):
            return self.count

        def __getitem__(self, part):
            assert part.stop <= self.count
            return Buffer(part.stop - (part.start or 0))

        def view(self, *shape):
            assert self.count == shape[0] * shape[1]
            return SimpleNamespace(shape=shape, stride=lambda axis: shape[1])

    held = qsa_workspace._buffers[GPU]
    monkeypatch.setitem(qsa_workspace._buffers, GPU, Buffer(held.numel()))
    monkeypatch.setattr(select, "score_groups", lambda *args: parts.append((args[8], args[9].shape[0])))
    monkeypatch.setattr(select, "_select_kernel", {(n,): lambda *a, **k: None for n in range(2049)})
    rows = 2048
    q = SimpleNamespace(shape=(rows, 4, 128), device=GPU)
    cache = SimpleNamespace(shape=(9, 256, 1, 128))
    out = torch.empty(rows, BUDGET // RATIO, dtype=torch.int32)
    visible = torch.empty(rows, dtype=torch.int32)
    for requests in (rows, 1):
        table = torch.empty(requests, CONTEXT // RATIO // 256)
        parts.clear()
        if requests == rows:
            select.qsa_select_paged_decode(q, cache, table, visible, BUDGET, RATIO, 1, out)
        else:
            select.qsa_select_paged_prefill(q, cache, table, None, visible, BUDGET, RATIO, rows, out, CONTEXT)
        assert sum(count for _, count in parts) == rows
        assert [first for first, _ in parts] == list(range(0, rows, parts[0][1]))
        # 227 rows fit (65,536 keys and a top for eight of them, 4 bytes each); 2,048 go in ten parts, of equal size or
        # of whole tiles of a prompt's rows.
        assert parts[0][1] == (1 if megabytes == "0" else 205 if requests == rows else 7 * 32)
    assert len(taken) == 1


def test_the_size_by_default(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert indexer_workspace_bytes(1) == 64 << 20


def test_one_row_of_a_longer_context(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert indexer_workspace_bytes(4 << 20) == 4 << 20


def test_the_buffer_does_not_grow(taken):
    """Captured graphs hold its address."""
    first = indexer_workspace(GPU, 100)
    assert indexer_workspace(GPU, 64 << 20) is first
    with pytest.raises(RuntimeError, match=f"takes {65 << 20} bytes, .* has {64 << 20}: set {VARIABLE} to at least 65"):
        indexer_workspace(GPU, 65 << 20)


def test_nothing_on_a_cpu(monkeypatch, taken):
    run_without_metadata(monkeypatch, "cpu")
    assert not taken


def test_nothing_under_capture(monkeypatch, taken):
    monkeypatch.setattr(qsa_workspace.torch.cuda, "is_current_stream_capturing", lambda: True)
    run_without_metadata(monkeypatch, "cuda")
    assert not taken
