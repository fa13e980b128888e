"""The reference of sparse attention against upstream's Triton kernel (interpreted) and torch's own."""

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp.cpu.qsa.impl import CpuQSAImpl
from vllm.models.qwen4_exp.nvidia.ops import qsa as kernel
from vllm.models.qwen4_exp.qsa import reference as twin

from .qsa_inputs import Batch, nan_pages

PAGE, KV_HEADS, WIDTH = 4, 2, 32


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(lengths, queries, heads, selected):
    batch = Batch(lengths, queries, page_size=PAGE)
    keys, values = (nan_pages(batch.num_pages, PAGE, KV_HEADS, WIDTH) for _ in "kv")
    for request, length in enumerate(lengths):
        for token in range(length):
            slot = batch.slot(request, token, PAGE)
            for cache in (keys, values):
                row = torch.randn(KV_HEADS, WIDTH).bfloat16()
                cache[slot // PAGE, slot % PAGE] = row
    rows = sum(queries)
    indices = torch.full((rows, selected + 1), -1, dtype=torch.int32)
    for row, position in enumerate(batch.positions.tolist()):
        picked = torch.randperm(position + 1)[:selected]
        indices[row, : len(picked)] = picked.int()
        indices[row, -1] = len(picked)
    q = torch.randn(rows, heads, WIDTH).bfloat16()
    gate = torch.randn(rows, heads * WIDTH).bfloat16()
    return batch, keys, values, indices, q, gate


def attend(batch, keys, values, indices, q, gate):
    paged = (keys, values, indices, batch.block_table, batch.token_to_req)
    return twin.sparse_paged_attention(q, *paged, torch.full_like(q, torch.nan), output_gate=gate)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("selected", [3, 20])
def test_equals_the_kernel(heads, selected):
    batch, keys, values, indices, q, gate = inputs([21, 2, 9], [5, 2, 1], heads, selected)
    out = attend(batch, keys, values, indices, q, gate)
    want = torch.full_like(q, torch.nan)
    paged = (keys, values, indices, batch.block_table, batch.token_to_req)
    kernel.qsa_sparse_paged_attention(q, *paged, True, want, output_gate=gate.view(q.shape))
    # The kernel rounds probabilities to bfloat16 before it multiplies V.
    torch.testing.assert_close(out, want, rtol=2**-5, atol=2e-2)


def test_everything_selected_is_plain_attention():
    batch, keys, values, _, q, gate = inputs([13], [13], 6, 1)
    positions = torch.arange(13).int()
    indices = torch.where(positions[None] <= positions[:, None], positions[None], -1)
    indices = torch.cat((indices, positions[:, None] + 1), 1).int()
    out = attend(batch, keys, values, indices, q, gate)
    slots = torch.tensor([batch.slot(0, t, PAGE) for t in range(13)])
    k, v = (c.flatten(0, 1)[slots].float().transpose(0, 1) for c in (keys, values))
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1), k, v, is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    want = plain * torch.sigmoid(gate.float()).view(q.shape)
    torch.testing.assert_close(out.float(), want, rtol=2**-6, atol=4e-3)


def test_passes_do_not_change_the_result(monkeypatch):
    batch, keys, values, indices, q, gate = inputs([40], [17], 2, 9)
    arguments = (batch, keys, values, indices, q, gate)
    whole = attend(*arguments)
    monkeypatch.setattr(twin, "_PASS_BYTES", 1)
    one_by_one = attend(*arguments)
    torch.testing.assert_close(one_by_one, whole, rtol=2**-7, atol=1e-6)


def test_a_row_that_selects_nothing_is_zero():
    batch, keys, values, indices, q, gate = inputs([5], [2], 2, 3)
    indices[1] = -1
    indices[1, -1] = 0
    out = attend(batch, keys, values, indices, q, gate)
    assert out[0].isfinite().all() and (out[1] == 0).all()


@pytest.mark.parametrize(
    ("cache_dtype", "scale", "close"),
    [
        ("auto", 1.0, {"rtol": 0, "atol": 2e-3}),
        # Three mantissa bits; half a step of a row's largest.
        ("fp8", 0.5, {"rtol": 2**-4, "atol": 2e-3}),
        ("int8_per_token_head", 1.0, {"rtol": 2**-8, "atol": 4 / 254}),
    ],
)
def test_written_rows_are_read_back(cache_dtype, scale, close):
    """One token per slot, attended alone: the output is the gated value."""
    layer = SimpleNamespace(_k_scale_float=scale, _v_scale_float=scale)
    impl = CpuQSAImpl(2, WIDTH, 1.0, KV_HEADS, None, None, cache_dtype)
    cache = torch.zeros(3, KV_HEADS, PAGE, impl.form.content(WIDTH), dtype=impl.form.dtype)
    key, value = torch.randn(2, 4, KV_HEADS, WIDTH).bfloat16()
    slots = torch.tensor([9, -1, 4])
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    layer.topk_indices_buffer = torch.tensor([[1, 1], [0, 1]], dtype=torch.int32)
    metadata = SimpleNamespace(num_actual_tokens=2, block_table=torch.tensor([[2], [1]], dtype=torch.int32))
    output = torch.full((3, 2, WIDTH), torch.nan).bfloat16()
    query = torch.randn(3, 2, WIDTH).bfloat16()
    requests, gate = torch.tensor([0, 1, 0]), torch.full((3, 2, WIDTH), 50.0)
    impl.forward_qsa(layer, query, key, value, cache, metadata, output, requests, False, gate)
    torch.testing.assert_close(output[:2], value[[0, 2]], **close)
    assert (output[2] == 0).all()
