"""The arena stands in the memory profile, and so does what sections use beside it. No GPU: stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp.nvidia import model
from vllm.models.qwen4_exp.qsa.host_kv import arena
from vllm.models.qwen4_exp.qsa.host_kv.spec import HostRows

from .planning import rows

MIB = 1 << 20


class Output(SimpleNamespace):
    """The layer's output of 2048 tokens, on a device that need not be there."""

    shape = (2048, 24, 256)

    def zero_(self) -> None:
        self.zeroed = True


@pytest.fixture
def profiled(monkeypatch):
    """``profiled(device, host_rows)``: arenas made and bytes taken when the profiling pass calls upstream's layer."""
    made, taken = [], []
    monkeypatch.setattr(
        "vllm.models.qwen4_exp.nvidia.qsa.get_forward_context", lambda: SimpleNamespace(attn_metadata=None)
    )
    monkeypatch.setattr("vllm.models.qwen4_exp.qsa_workspace.take_indexer_workspace", lambda *unused: None)
    fake = SimpleNamespace(
        empty=lambda size, dtype, device: taken.append(size),
        uint8=torch.uint8,
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: False),
    )
    monkeypatch.setattr(arena, "torch", fake)
    monkeypatch.setattr(arena, "arena_on", lambda device, size: made.append(size))

    def run(device: str, host_rows, capturing: bool = False):
        fake.cuda.is_current_stream_capturing = lambda: capturing
        layer = SimpleNamespace(
            config=None,
            host_rows=host_rows,
            indexer=SimpleNamespace(packed_output_width=2052),
            num_heads=24,
            head_dim=256,
        )
        output = Output(device=torch.device(device))
        model.Qwen4ExpQSAAttention._run_qsa(layer, None, None, None, None, None, output, None, None)
        assert output.zeroed
        return made, taken, layer

    return run


def test_the_profile_takes_both(profiled):
    made, taken, layer = profiled("cuda", HostRows(rows(), 96 * MIB))
    assert made == [96 * MIB]
    assert taken == [arena.workspace_bytes(layer, 2048)]
    # A float32 sum and the selection of each token are 64 MiB; what is counted beside them is in test_workspace.py.
    assert 64 * MIB < taken[0] < 80 * MIB


@pytest.mark.parametrize(
    "case", [("cpu", HostRows(rows(), MIB)), ("cuda", None), ("cuda", HostRows(rows(), MIB), True)]
)
def test_nothing_where_it_has_no_place(profiled, case):
    made, taken, _ = profiled(*case)
    assert not made and not taken


def test_layers_take_turns_with_one_arena():
    cpu = torch.device("cpu")
    first = arena.arena_on(cpu, 1 << 12)
    assert arena.arena_on(cpu, 1 << 12) is first
    assert first.halves(100).shape == (2, (1 << 11) // 100, 100)
    assert arena.arena_on(cpu, 1 << 13) is not first
