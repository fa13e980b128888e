"""Whether kernels are right on this GPU; nothing is timed where they are not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.qsa_kernels.inputs import Paged, Queries
from vllm.models.qwen4_exp.qsa import reference

#: Errors allowed, in those of rounding the reference to bf16; see tests/qsa/test_attention.py
TIMES_FLOOR = 2.0

Attention = Callable[[Paged, Queries, bool], torch.Tensor]


def expected(cache: Paged, asked: Queries, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(asked.q.shape, dtype=dtype, device=asked.q.device)
    return reference.sparse_paged_attention(
        asked.q, cache.kv.keys, cache.kv.values, asked.selected, cache.block_table, asked.token_to_req, out,
        output_gate=asked.gate, **cache.scales,
    )  # fmt: skip


def error(attention: Attention, cache: Paged, asked: Queries, prefill: bool, rows: int = 16) -> dict[str, float]:
    """Root mean square error against the exact result, and the floor that bf16 sets."""
    some = asked.part(slice(0, rows))
    exact = expected(cache, some, torch.float32)
    floor = (expected(cache, some, torch.bfloat16).float() - exact).square().mean().sqrt()
    got = attention(cache, some, prefill).float()
    return {"error": float((got - exact).square().mean().sqrt()), "floor": float(floor)}


def right(measured: dict[str, float]) -> bool:
    return measured["error"] <= TIMES_FLOOR * measured["floor"]


def differing_rows(attention: Attention, cache: Paged, asked: Queries, rows: int = 8) -> int:
    """Rows whose bits change with the kernel, or with who else is in the batch."""
    some = asked.part(slice(0, rows))
    together = attention(cache, some, False)
    changed = (attention(cache, some, True) != together).flatten(1).any(1)
    for row in range(len(together)):
        for prefill in (False, True):
            alone = attention(cache, some.part(slice(row, row + 1)), prefill)
            changed[row] |= (alone[0] != together[row]).any()
    whole = attention(cache, asked, True)[: len(together)]
    return int((changed | (whole != together).flatten(1).any(1)).sum())
