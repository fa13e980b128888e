"""The torch twins against upstream's Triton kernels, interpreted."""

import pytest
import torch

from vllm.models.qwen4_exp.cpu import hyperconnection as twin
from vllm.models.qwen4_exp.nvidia.ops import hc as kernel

EPS = 1e-6
# One bfloat16 step: the two may sum in another order before they round.
TOLERANCE = {"rtol": 2**-7, "atol": 1e-6}
SHAPES = [(1, 4, 16), (3, 4, 40), (2, 3, 600)]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens, count, width", SHAPES)
@pytest.mark.parametrize("shared", [True, False])
def test_norm(tokens, count, width, shared):
    x = bf16(tokens, count * width)
    weight = bf16(width if shared else count * width)
    got = twin.grouped_gemma_rmsnorm(x, weight, EPS, count)
    want = kernel.grouped_gemma_rmsnorm(x, weight, EPS, count)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("tokens, count, width", SHAPES)
def test_silu_of_a_strided_row(tokens, count, width):
    x = bf16(tokens, width + 5)[:, :width]
    torch.testing.assert_close(twin.hc_silu(x, count), kernel.hc_silu(x, count), **TOLERANCE)


@pytest.mark.parametrize("tokens, count, width", SHAPES)
def test_gate_mix(tokens, count, width):
    x, gate = bf16(tokens, count * width), bf16(tokens, count * width)
    got, want = twin.hc_gate_mix(x, gate, count), kernel.hc_gate_mix(x, gate, count)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("tokens, count, width", SHAPES)
@pytest.mark.parametrize("injected", [True, False])
def test_combine_and_norm(tokens, count, width, injected):
    state, block = bf16(tokens, count * width), bf16(tokens, width)
    # As the model passes it: a slice of a wider projection.
    logits = bf16(tokens, count + 9)[:, :count] if injected else None
    weight = bf16(count * width)
    before = state.clone()
    got = twin.hc_combine_norm(state, block, logits, weight, EPS, count)
    want = kernel.hc_combine_norm(state, block, logits, weight, EPS, count)
    torch.testing.assert_close(got, want, **TOLERANCE)
    plain = twin.hc_combine(state, block, logits, count)
    torch.testing.assert_close(plain, got[0], rtol=0, atol=0)
    assert torch.equal(state, before)


def test_large_values_do_not_overflow():
    x = torch.full((1, 32), 3e38, dtype=torch.float32).bfloat16()
    x[:, 16:] = 1e-30
    out = twin.grouped_gemma_rmsnorm(x * 1e-20, torch.zeros(32).bfloat16(), EPS, 2)
    assert out.isfinite().all()
    gated = twin.hc_gate_mix(x / 4, torch.full((1, 32), 80.0).bfloat16(), 2)
    assert gated.isfinite().all()
