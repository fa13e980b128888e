"""Bytes of int8 as operands, whatever lies beside them, and queries in two pieces."""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import operands, softmax
from vllm.triton_utils import tl, triton

ALL = torch.arange(-128, 128).to(torch.int8)


@triton.jit
def planes_kernel(pairs, out, N: tl.constexpr):
    at = tl.arange(0, N)
    planes = operands.planes(tl.load(pairs + at)[None, :], "int8")
    for i in tl.static_range(2):
        tl.store(out + i * N + at[None, :], planes[i])


@triton.jit
def keys_kernel(rows, out, N: tl.constexpr, DIM: tl.constexpr):
    row = tl.arange(0, N)
    keys = operands.load_keys(rows, row * (DIM // 4), row < N, "int8", DIM)
    tl.store(out + row[:, None] * DIM + tl.arange(0, DIM)[None, :], keys)


@triton.jit
def query_kernel(q, upper, lower, units, ROWS: tl.constexpr, DIM: tl.constexpr):
    row = tl.arange(0, ROWS)
    pieces, unit = operands.as_operands(operands.load_query(q, DIM, 0, "int8", ROWS, ROWS, DIM), "int8")
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(upper + at, pieces[0])
    tl.store(lower + at, pieces[1])
    tl.store(units + row, unit)


@triton.jit
def exponent_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, operands.exponent_of(tl.load(x + at)))


@triton.jit
def power_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, softmax.power_of_two(tl.load(x + at)))


def query(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pieces of bf16 ``[rows, dim]`` come to, in float64, and their units."""
    upper, lower = (torch.zeros(q.shape, dtype=torch.int8) for _ in "ul")
    units = torch.zeros(len(q))
    query_kernel[(1,)](q, upper, lower, units, ROWS=len(q), DIM=q.shape[1])
    return (256 * upper.double() + lower) * units[:, None], units


@pytest.mark.parametrize("other", [-128, -1, 0, 127])
@pytest.mark.parametrize("place", range(2))
def test_planes_are_bytes(place, other):
    bytes_ = torch.full((256, 2), other, dtype=torch.int8)
    bytes_[:, place] = ALL
    out = torch.zeros(2, 256, dtype=torch.float16)
    planes_kernel[(1,)](bytes_.view(torch.int16).squeeze(1), out, N=256)
    assert torch.equal(out.float(), (bytes_.T.float() + 128) * 2.0**-24)


def test_keys_stay_as_they_are():
    rows = torch.stack((ALL, ALL.flip(0)))
    out = torch.zeros_like(rows)
    keys_kernel[(1,)](rows.view(torch.int32), out, N=2, DIM=256)
    assert torch.equal(out, rows)


@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**90])
def test_a_query_keeps_its_bits_near_its_largest_number_and_half_a_unit_below(size):
    q = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * size
    # Largest numbers of either sign whose mantissa is all ones, and others.
    q[0, 0], q[1, 0], q[2, 0] = 7.96875 * size, -7.96875 * size, 7.9375 * size
    got, units = query(q)
    largest = q.double().abs().amax(1, keepdim=True)
    power = 2.0 ** largest.log2().floor()
    assert torch.equal(units.double()[:, None], power * 2.0**-14)
    error = (got - q.double()).abs() / units.double()[:, None]
    error[q == 7.96875 * size] -= 0.5
    assert error.max() <= 0.5
    near = (q.double().abs() >= power * 2.0**-6) & (q != 7.96875 * size)
    assert near.any(1).all() and (error[near] == 0).all()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf, 2.0**101])
def test_a_damaged_query_has_a_unit_that_is_no_number(damage):
    q = torch.ones(16, 64).bfloat16()
    q[3, 5] = damage
    _, units = query(q)
    assert units.isnan().tolist() == [row == 3 for row in range(16)]


def test_a_query_of_zeros_is_zeros():
    got, units = query(torch.zeros(16, 64).bfloat16())
    assert (got == 0).all() and units.isfinite().all()


def test_exponents_of_scales():
    x = torch.tensor([0.0, 2.0**-140, 2.0**-100, 0.0078125, 0.0117, 1.0, 1.999, 2.0, 3.4e38, torch.inf, torch.nan])
    x = torch.cat((x, torch.ones(16 - len(x))))
    out = torch.zeros(16)
    exponent_kernel[(1,)](x, out, N=16)
    assert out[:11].tolist() == [-100, -100, -100, -7, -7, 0, 0, 1, 127, 128, 128]


def test_powers_of_two_are_exact():
    x = torch.cat((-torch.arange(0.0, 127), torch.tensor([-127.0, -128.0, -1e30, -torch.inf, -1e9])))
    x = torch.cat((x, torch.zeros(256 - len(x))))
    out = torch.zeros(256)
    power_kernel[(1,)](x, out, N=256)
    assert out.tolist() == [2.0**e if e > -127 else 0.0 for e in x.tolist()]
