"""Paged K/V of uneven requests in every format, in pages that nothing else has written."""

from dataclasses import dataclass

import torch

from vllm.models.qwen4_exp.qsa import e4m3
from vllm.models.qwen4_exp.qsa.formats import FP8, INT8, KVFormat, views

K_SCALE, V_SCALE = 0.03, 0.02


@dataclass
class Scene:
    """One layer's cache, and rows that attend to it; ``call`` runs an implementation."""

    form: KVFormat
    cache: torch.Tensor
    q: torch.Tensor
    gate: torch.Tensor
    selected: torch.Tensor
    block_table: torch.Tensor
    token_to_req: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def stored(self) -> dict[str, object]:
        """Keyword arguments of the cache's scales."""
        kv = views(self.cache, self.form, self.q.shape[2])
        if self.form is FP8:
            return {"k_scale": K_SCALE, "v_scale": V_SCALE}
        return {"key_scales": kv.key_scales, "value_scales": kv.value_scales}

    @property
    def paged(self) -> tuple[torch.Tensor, ...]:
        kv = views(self.cache, self.form, self.q.shape[2])
        return kv.keys, kv.values, self.selected, self.block_table, self.token_to_req

    def call(self, attention, prefill: bool = False, rows: slice = slice(None)) -> torch.Tensor:
        out = torch.full_like(self.q[rows], torch.nan)
        keys, values, selected, table, token_to_req = self.paged
        arguments = (self.q[rows], keys, values, selected[rows].contiguous(), table, token_to_req[rows], out)
        attention(*arguments, output_gate=self.gate[rows], prefill=prefill, **self.stored)
        return out


def unwritten(form: KVFormat, blocks: int, heads: int, size: int, dim: int) -> torch.Tensor:
    """A cache whose every byte reads as NaN, in rows and in scales."""
    raw = torch.full((blocks * heads * size * form.token_bytes(dim),), 0xFF, dtype=torch.uint8)
    return raw.view(form.dtype).view(blocks, heads, size, form.content(dim))


def store(scene_views, form: KVFormat, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """One token's key and value ``[kv_heads, dim]`` into its slot."""
    for rows, scales, number, layer_scale in (
        (scene_views.keys, scene_views.key_scales, key, K_SCALE),
        (scene_views.values, scene_views.value_scales, value, V_SCALE),
    ):
        if form is INT8:
            scales[block, place] = number.abs().amax(-1) / 127
            number = (number / scales[block, place].unsqueeze(-1)).round()
        if form is FP8:
            number = e4m3.encode_reference(number / layer_scale)
        rows[block, place] = number.to(form.dtype)


def scene(
    form: KVFormat, counts: list[int], *, lengths: list[int] | None = None, width: int = 70, kv_heads: int = 2,
    group: int = 3, dim: int = 64, size: int = 16, seed: int = 0,
) -> Scene:  # fmt: skip
    """One row per request, which attends to ``counts`` of its tokens, in ascending order.

    Requests have ``lengths`` tokens, those of ``counts`` and a few more unless given.
    Blocks are dealt out in random order up to the pool's last one.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = lengths or [count + 3 for count in counts]
    per_request = -(-max(lengths) // size) + 1
    blocks = 1 + len(counts) * per_request
    table = torch.randperm(blocks - 1, generator=random)[: len(counts) * per_request].view(len(counts), -1) + 1
    cache = unwritten(form, blocks, kv_heads, size, dim)
    kv = views(cache, form, dim)
    keys, values = torch.randn(2, len(counts), max(lengths), kv_heads, dim, generator=random)
    for request, length in enumerate(lengths):
        for token in range(length):
            block = int(table[request, token // size])
            store(kv, form, block, token % size, keys[request, token], values[request, token])
    selected = torch.full((len(counts), width + 1), -1, dtype=torch.int32)
    for row, (count, length) in enumerate(zip(counts, lengths)):
        selected[row, :count] = torch.randperm(length, generator=random)[:count].sort().values.int()
        selected[row, -1] = count
    q, gate = torch.randn(2, len(counts), kv_heads * group, dim, generator=random).bfloat16()
    requests = torch.arange(len(counts), dtype=torch.int32)
    return Scene(form, cache, q, gate, selected, table.int(), requests, keys, values)
