"""Triton's interpreter multiplies bfloat16 as numbers here; without the repair it does not."""

import os
import subprocess
import sys

import pytest
import torch

from vllm import triton_interpreter
from vllm.triton_utils import HAS_TRITON, tl, triton


@triton.jit
def arithmetic_kernel(a_ptr, b_ptr, product_ptr, sum_ptr, less_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(product_ptr + at, a * b)
    tl.store(sum_ptr + at, a + b)
    # Two comparisons joined: fails where a comparison keeps its operands' type.
    tl.store(less_ptr + at, ((a < b) & (b > 0)).to(tl.int32))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def round_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


def test_the_interpreter_is_in_use():
    assert HAS_TRITON
    assert triton.knobs.runtime.interpret


def test_elementwise_equals_torch():
    torch.manual_seed(0)
    a, b = torch.randn(2, 64, dtype=torch.bfloat16)
    product, total = torch.full((2, 64), torch.nan, dtype=torch.bfloat16)
    less = torch.full((64,), -1, dtype=torch.int32)
    arithmetic_kernel[(1,)](a, b, product, total, less, N=64)
    assert torch.equal(product, a * b)
    assert torch.equal(total, a + b)
    assert torch.equal(less.bool(), (a < b) & (b > 0))


def test_dot_equals_torch():
    torch.manual_seed(1)
    a, b = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    out = torch.full((16, 16), torch.nan)
    dot_kernel[(1,)](a, b, out, N=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_rounding_is_to_nearest_even():
    halfway = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.9999999, -1e-40])
    edges = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    x = torch.cat((halfway, edges))
    out = torch.zeros(8, dtype=torch.bfloat16)
    round_kernel[(1,)](x, out, N=8)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_wrong_interpreter_is_refused(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, d, *rest: d)
    with pytest.raises(RuntimeError, match="cannot be interpreted correctly"):
        triton_interpreter.repair()


def test_the_repair_is_needed():
    """When this fails, Triton has mended its interpreter and the repair can go."""
    script = (
        "import triton.runtime.interpreter as i, triton.language as tl, numpy as np\n"
        "h = lambda v: i.TensorHandle(np.array([v], np.uint16), tl.bfloat16)\n"
        "print(i.interpreter_builder.create_fmul(h(0x3FC0), h(0x4020)).data.item())\n"
    )
    env = os.environ | {"TRITON_INTERPRET": "1"}
    got = subprocess.check_output([sys.executable, "-c", script], env=env)
    assert int(got) != 0x4070, "1.5 * 2.5 is 3.75 without the repair"


def test_the_users_setting_wins():
    script = "import os, vllm; print(os.environ['TRITON_INTERPRET'])"
    env = os.environ | {"TRITON_INTERPRET": "0"}
    got = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    assert got.split()[-1] == "0"
