"""Every code of int8 as an operand, whatever lies beside it in its word."""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import operands
from vllm.triton_utils import tl, triton

ALL = torch.arange(-128, 128).to(torch.int8)


@triton.jit
def planes_kernel(words, below, out, N: tl.constexpr):
    at = tl.arange(0, N)
    planes = operands.planes(tl.load(words + at)[None, :], operands.sign_bits(below), "int8")
    for i in tl.static_range(4):
        tl.store(out + i * N + at[None, :], planes[i])


@triton.jit
def halves_kernel(words, below, out, N: tl.constexpr):
    at = tl.arange(0, N)
    halves = operands.halves(tl.load(words + at)[None, :], operands.sign_bits(below), "int8")
    twice = tl.arange(0, 2 * N)
    for i in tl.static_range(2):
        tl.store(out + i * 2 * N + twice[None, :], halves[i])


def operand(x: torch.Tensor) -> torch.Tensor:
    return (x.float() + 128) * 2.0**-24


@pytest.mark.parametrize("others", [-128, -1, 0, 127])
@pytest.mark.parametrize("place", range(4))
def test_planes_are_bytes(place, others):
    bytes_ = torch.full((256, 4), others, dtype=torch.int8)
    bytes_[:, place] = ALL
    out = torch.zeros(4, 256, dtype=torch.float16)
    planes_kernel[(1,)](bytes_.view(torch.int32).squeeze(1), torch.zeros(1, dtype=torch.int32), out, N=256)
    assert torch.equal(out.float(), operand(bytes_.T))


def test_halves_are_even_and_odd_bytes():
    bytes_ = torch.stack((ALL, ALL.flip(0), ALL.roll(3), ALL.roll(100)), 1)
    out = torch.zeros(2, 512, dtype=torch.float16)
    halves_kernel[(1,)](bytes_.contiguous().view(torch.int32).squeeze(1), torch.ones(1, dtype=torch.int32), out, N=256)
    assert torch.equal(out.float(), operand(torch.stack((bytes_[:, ::2].flatten(), bytes_[:, 1::2].flatten()))))
