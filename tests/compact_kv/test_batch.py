"""A request's K/V and what attention gives it do not depend on its neighbours, bit for bit, from slots to output.

The layer's own calls with our Triton kernels, interpreted, over a batch of uneven requests and over each alone.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.cpu.qsa_inputs import Batch
from vllm.models.qwen4_exp.compact_kv import impl as module
from vllm.models.qwen4_exp.compact_kv.choice import Kernels
from vllm.models.qwen4_exp.cpu.qsa import impl as cpu
from vllm.models.qwen4_exp.qsa.formats import kv_format

HEADS, KV_HEADS, WIDTH, PAGE, WIDEST = 2, 1, 64, 4, 6
LENGTHS, QUERIES = [7, 1, 3], [2, 1, 1]


class Layer:
    """One layer's cache and calls; every request has pages of its own."""

    def __init__(self, cache_dtype: str, batch: Batch) -> None:
        self.impl = cpu.CpuQSAImpl(HEADS, WIDTH, 1.0, KV_HEADS, None, None, cache_dtype)
        form, self.batch = self.impl.form, batch
        # NaN in every format: what nobody wrote must not be read.
        raw = torch.full((batch.num_pages * KV_HEADS * PAGE * form.token_bytes(WIDTH),), 0xFF, dtype=torch.uint8)
        self.cache = raw.view(form.dtype).view(batch.num_pages, KV_HEADS, PAGE, form.content(WIDTH))
        self.module = SimpleNamespace(_k_scale_float=0.05, _v_scale_float=0.05)

    def step(self, requests: list[int], rows: dict, prefill: bool) -> torch.Tensor:
        """Write all tokens of `requests`, then attend from their queries; the output, request by request."""
        slots = [self.batch.slot(r, token, PAGE) for r in requests for token in range(LENGTHS[r])]
        written = (torch.cat([rows[what][r] for r in requests]) for what in ("key", "value"))
        self.impl.do_kv_cache_update(self.module, *written, self.cache, torch.tensor(slots))
        query, gate, selected = (torch.cat([rows[what][r] for r in requests]) for what in ("query", "gate", "selected"))
        self.module.topk_indices_buffer = selected
        counts = torch.tensor([QUERIES[r] for r in requests])
        metadata = SimpleNamespace(num_actual_tokens=len(query), block_table=self.batch.block_table[requests])
        of_row = torch.repeat_interleave(torch.arange(len(requests)), counts).int()
        out = torch.full_like(query, torch.nan)
        self.impl.forward_qsa(
            self.module, query, None, None, self.cache, metadata, out, of_row, prefill, output_gate=gate
        )
        return out


def random_rows() -> dict[str, list[torch.Tensor]]:
    made = {
        what: [torch.randn(n, heads, WIDTH).bfloat16() for n in numbers]
        for what, heads, numbers in (
            ("key", KV_HEADS, LENGTHS),
            ("value", KV_HEADS, LENGTHS),
            ("query", HEADS, QUERIES),
            ("gate", HEADS, QUERIES),
        )
    }
    made["selected"] = []
    for length, queries in zip(LENGTHS, QUERIES):
        selected = torch.full((queries, WIDEST + 1), -1, dtype=torch.int32)
        for row, position in enumerate(range(length - queries, length)):
            picked = torch.randperm(position + 1)[: WIDEST - row].sort().values
            selected[row, : len(picked)], selected[row, -1] = picked.int(), len(picked)
        made["selected"].append(selected)
    return made


@pytest.mark.parametrize(("cache_dtype", "prefill"), [("auto", True), ("fp8", True), ("int8_per_token_head", False)])
def test_alone_as_in_a_batch(monkeypatch, cache_dtype, prefill):
    torch.manual_seed(3)
    monkeypatch.setattr(cpu, "choose", lambda name: (kv_format(name), Kernels.OURS))
    batch, rows = Batch(LENGTHS, QUERIES, page_size=PAGE), random_rows()
    together = Layer(cache_dtype, batch)
    out = together.step([0, 1, 2], rows, prefill).split(QUERIES)
    assert all(part.isfinite().all() for part in out)
    for request in range(3):
        alone = Layer(cache_dtype, batch)
        # The other kernel of the two: a step that decodes for one may be one that reads prompts for others.
        assert torch.equal(alone.step([request], rows, not prefill), out[request])
        pages = batch.block_table[request].long()
        assert torch.equal(alone.cache[pages].view(torch.uint8), together.cache[pages].view(torch.uint8))


def test_the_kernels_are_ours(monkeypatch):
    monkeypatch.setattr(cpu, "choose", lambda name: (kv_format(name), Kernels.OURS))
    made = cpu.CpuQSAImpl(HEADS, WIDTH, 1.0, KV_HEADS, None, None, "fp8")
    assert made.write.__module__.endswith("qsa.write.rows") and made.attend.__module__.endswith("qsa.attention")
    assert issubclass(cpu.CpuQSAImpl, module.PagedQSA)
