"""What was not written is found, to the element; what was written is left alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.model_loader import canary
from vllm.model_executor.model_loader.canary import Canaries, Hole

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5), (4, 8), (7, 3, 8), ()])
def test_untouched(dtype, shape):
    before = torch.full(shape, 3, dtype=torch.float32).to(dtype)
    tensor = before.clone()
    canaries = Canaries([("x", tensor)])
    holes = canaries.holes([("x", tensor)])
    # Of a single byte nobody can say whether it is a weight.
    assert holes == ({} if tensor.nbytes == 1 else {"x": Hole(tensor.numel(), tensor.numel(), (0,) * len(shape))})
    if tensor.nbytes > 1:
        assert torch.equal(tensor.float(), before.float())  # the default is back


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_of_one_expert(dtype):
    tensor = torch.empty(6, 4, 16, dtype=dtype)
    canaries = Canaries([("x", tensor)])
    written = torch.randint(0, 100, tensor.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for expert in range(6):
        for row in range(4):
            if (expert, row) != (4, 2):
                tensor[expert, row].copy_(written[expert, row])
    assert canaries.holes([("x", tensor)]) == {"x": Hole(16, 6 * 4 * 16, (4, 2, 0))}
    keep = torch.ones(6, 4, dtype=torch.bool)
    keep[4, 2] = False
    assert torch.equal(tensor.float()[keep], written.float()[keep])


def test_written_with_any_bytes():
    """All 2-byte patterns as they may be packed, and random words."""
    tensor = torch.empty(1 << 16, dtype=torch.int16)
    canaries = Canaries([("x", tensor)])
    tensor.copy_(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16))
    assert not canaries.holes([("x", tensor)])
    tensor = torch.empty(1 << 16, dtype=torch.int32)
    canaries = Canaries([("x", tensor)])
    tensor.random_(-(1 << 31), (1 << 31) - 1)
    assert not canaries.holes([("x", tensor)])


@pytest.mark.parametrize("kept", [False, True])
def test_a_tensor_is_looked_at_in_parts(monkeypatch, kept):
    """Experts of the published model are larger than a part; a hole in the third has the place that it has."""
    monkeypatch.setattr(canary, "_CHUNK", 64)
    monkeypatch.setattr(canary, "_KEEP", (1 << 20) * kept)
    tensor = torch.full((40, 4), 7.0)  # 16 bytes a row, 4 rows a part
    canaries = Canaries([("x", tensor)])
    tensor[:9].fill_(5), tensor[11:].fill_(5)
    assert canaries.holes([("x", tensor)]) == {"x": Hole(8, 160, (9, 0))}
    assert (tensor[9:11] == (7 if kept else 0)).all() and (tensor[:9] == 5).all() and (tensor[11:] == 5).all()


def test_a_large_hole_becomes_zero():
    """No former value is kept of what is large: it had none."""
    tensor = torch.full((1 << 19,), 7.0)
    canaries = Canaries([("x", tensor)])
    tensor[: 1 << 18].fill_(5)
    assert canaries.holes([("x", tensor)]) == {"x": Hole(1 << 18, 1 << 19, (1 << 18,))}
    assert (tensor[: 1 << 18] == 5).all() and (tensor[1 << 18 :] == 0).all()


def test_passed_over():
    tensors = {
        "meta": torch.empty(8, device="meta"),
        "empty": torch.empty(0),
        "strided": torch.empty(8, 8).t(),
        "watched": torch.empty(8),
    }
    assert Canaries(tensors.items()).watched == {"watched"}


def test_a_parameter_whose_data_was_replaced():
    """Loaders may set ``.data``; the memory that was there before is nobody's then."""
    parameter = torch.nn.Parameter(torch.empty(8), requires_grad=False)
    canaries = Canaries([("x", parameter)])
    parameter.data = torch.ones(8)
    assert not canaries.holes([("x", parameter)]) and torch.equal(parameter, torch.ones(8))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 9), dtype=st.sampled_from(DTYPES), missing=st.integers(0, 8))
def test_any_row(rows, width, dtype, missing):
    """A row left out is found wherever it covers a word of 8 aligned bytes, and nothing else is ever found."""
    tensor = torch.empty(rows, width, dtype=dtype)
    canaries = Canaries([("x", tensor)])
    for row in range(rows):
        if row != missing:
            tensor[row].copy_(torch.full((width,), 2.0).to(dtype))
    holes = canaries.holes([("x", tensor)])
    first, last = missing * width * tensor.element_size(), (missing + 1) * width * tensor.element_size()
    covered = missing < rows and -(-first // 8) * 8 + 8 <= last
    if covered:
        assert 0 < holes["x"].missing <= width and holes["x"].first[0] == missing
    if missing >= rows:
        assert not holes
