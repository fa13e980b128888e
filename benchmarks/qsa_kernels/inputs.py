"""Caches, selections and queries of a run: random, of the published shape, in pages dealt out at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.qsa_kernels.geometry import Geometry
from vllm.models.qwen4_exp.qsa.e4m3 import encode_reference
from vllm.models.qwen4_exp.qsa.formats import FP8, INT8, KVFormat, KVViews, views

#: of fp8 layers: random normal numbers use e4m3's upper exponents
LAYER_SCALE = 1 / 64
#: Spread of one row's group scores about those of its chunk; 0.25 makes neighbours share nine rows in ten.
NOISE = 0.25


@dataclass
class Paged:
    """Requests of one length in one format."""

    form: KVFormat
    kv: KVViews
    block_table: torch.Tensor

    @property
    def scales(self) -> dict[str, object]:
        if self.form is FP8:
            return {"k_scale": LAYER_SCALE, "v_scale": LAYER_SCALE}
        return {"key_scales": self.kv.key_scales, "value_scales": self.kv.value_scales}


def paged(shape: Geometry, form: KVFormat, requests: int, context: int, block_size: int, device: str) -> Paged:
    """Fill a cache block by block, so that nothing but the cache needs memory."""
    per_request = -(-context // block_size)
    blocks = 1 + requests * per_request
    # Heads inside a token, as vLLM binds these layers' caches where nobody asks for another layout.
    cache = torch.empty(blocks, block_size, shape.kv_heads, form.content(shape.dim), dtype=form.dtype, device=device)
    kv = views(cache.transpose(1, 2), form, shape.dim)
    for block in range(blocks):
        for rows, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
            number = torch.randn(rows.shape[1:], device=device)
            if form is INT8:
                scales[block] = number.abs().amax(-1) / INT8.largest
                number = (number / scales[block].unsqueeze(-1)).round()
            rows[block] = encode_reference(number / LAYER_SCALE) if form is FP8 else number.to(form.dtype)
    table = (torch.randperm(blocks - 1, device=device) + 1).view(requests, per_request).int()
    return Paged(form, kv, table)


@dataclass
class Queries:
    """Rows of a step; ``token_to_req`` says whose."""

    q: torch.Tensor
    gate: torch.Tensor
    selected: torch.Tensor
    token_to_req: torch.Tensor

    def part(self, rows: slice) -> Queries:
        return Queries(self.q[rows], self.gate[rows], self.selected[rows].contiguous(), self.token_to_req[rows])


def queries(shape: Geometry, requests: int, rows: int, context: int, device: str) -> Queries:
    """``rows`` last tokens of each request, with what an indexer could have selected for them.

    Groups have scores that all rows of a request share, and each row adds noise of its own: neighbours select mostly
    the same, as they do in a text.
    """
    count = requests * rows
    selected = torch.full((count, shape.width + 1), -1, dtype=torch.int32, device=device)
    for request in range(requests):
        base = torch.randn(context // shape.ratio, device=device)
        for row in range(rows):
            position = context - rows + row
            groups = (position + 1) // shape.ratio
            scores = base[:groups] + NOISE * torch.randn(groups, device=device)
            best = scores.topk(min(groups, shape.budget // shape.ratio)).indices.sort().values
            whole = (best[:, None] * shape.ratio + torch.arange(shape.ratio, device=device)).flatten()
            tokens = torch.cat((whole, torch.arange(groups * shape.ratio, position + 1, device=device)))
            selected[request * rows + row, : len(tokens)] = tokens.int()
            selected[request * rows + row, -1] = len(tokens)
    q, gate = torch.randn(2, count, shape.heads, shape.dim, device=device).bfloat16()
    owner = torch.arange(requests, device=device, dtype=torch.int32).repeat_interleave(rows)
    return Queries(q, gate, selected, owner)


def distinct(asked: Queries) -> int:
    """Tokens that some row selected, each request's counted apart: what has to come from memory at least once."""
    total = 0
    for request in asked.token_to_req.unique():
        lists = asked.selected[asked.token_to_req == request, :-1]
        total += lists[lists >= 0].unique().numel()
    return total
