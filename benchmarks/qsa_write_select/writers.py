"""From the projections to the caches: upstream's launch, and the one that takes its place.

`both parts` writes what upstream's writes, index and main cache; `ours alone` the main cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.qsa_write_select.timing import timed
from vllm.models.qwen4_exp.compact_kv.prepare import prepare
from vllm.models.qwen4_exp.nvidia import model  # noqa: F401  before its parts: they import each other
from vllm.models.qwen4_exp.nvidia.ops.qsa_prepare import qsa_prepare
from vllm.models.qwen4_exp.qsa import write
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, KVFormat, views
from vllm.models.qwen4_exp.qsa.write import reference


@dataclass(frozen=True)
class Widths:
    """Of the main attention; the indexer's (4 heads of 128, ratio 4) are what upstream's kernel is written for."""

    q_heads: int = 24
    kv_heads: int = 2
    head_dim: int = 256
    block: int = 1568


class Step:
    """One batch of decodes (every token a request of its own) or one prompt, with the caches it writes."""

    def __init__(self, tokens: int, widths: Widths, device: str, prompt: bool) -> None:
        w, self.widths, self.tokens, self.device = widths, widths, tokens, device

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).bfloat16()

        requests = 1 if prompt else tokens
        starts = torch.tensor([0, tokens]) if prompt else torch.arange(tokens + 1)
        positions = torch.arange(tokens) if prompt else torch.full((tokens,), 4003)
        ends = positions % 4 == 3
        blocks = -(-(tokens + 1) // w.block) + 1
        work = [[0, i] for i in range(max(1, tokens // 4))] if prompt else [[i, 0] for i in range(requests)]
        angle = torch.arange(8192).unsqueeze(1) * 1e7 ** -(torch.arange(0, 64, 2) / 64)
        cos_sin = torch.cat((angle.cos(), angle.sin()), -1).bfloat16().to(device)
        self.blocks = blocks
        self.qkv = normal(tokens, 2 * (w.q_heads + w.kv_heads) * w.head_dim)
        self.index = [
            normal(tokens, 512),
            normal(tokens, 128),
            (positions % 8192).to(device),
            cos_sin,
            normal(128),
            normal(128),
            1e-6,
            torch.empty(tokens, 4, 128, dtype=torch.bfloat16, device=device),
            normal(requests + 1, 4, 128),
            (positions % 4 + 4 * (1 + (0 if prompt else 1) * torch.arange(tokens))).to(device),
            torch.arange(1, requests + 1, dtype=torch.int32, device=device).unsqueeze(1),
            starts.int().to(device),
            positions.to(device),
            normal(-(-tokens // 392) + 1, 392, 128),
            torch.where(ends, torch.arange(tokens), -1).to(device),
            torch.tensor(work, dtype=torch.int32, device=device),
        ]
        self.main = {
            "mrope_section": None,
            "main_qkv": self.qkv,
            "main_q_norm_weight": normal(w.head_dim),
            "main_k_norm_weight": normal(w.head_dim),
            "main_eps": 1e-6,
            "main_slot_mapping": torch.randperm(blocks * w.block)[:tokens].to(device),
            "main_k_scale": 1.0,
            "main_v_scale": 1.0,
        }
        self.options = {"compress_ratio": 4, "rope_pos_offset": None}

    def cache(self, form: KVFormat) -> torch.Tensor:
        """As vLLM binds it: ``[blocks, kv_heads, block_size, content]`` with heads inside a token."""
        w = self.widths
        raw = torch.zeros(self.blocks, w.block, w.kv_heads, form.content(w.head_dim), dtype=form.dtype)
        return raw.to(self.device).transpose(1, 2)

    def upstream(self, cache: torch.Tensor) -> Callable:
        return partial(qsa_prepare, *self.index, main_kv_cache=cache.transpose(1, 2), **self.main, **self.options)

    def both(self, cache: torch.Tensor, form: KVFormat) -> Callable:
        """What a layer calls for a cache that upstream's kernel cannot write."""
        ours = partial(prepare, form, self.widths.head_dim)
        return partial(ours, *self.index, main_kv_cache=cache.transpose(1, 2), **self.main, **self.options)

    def alone(self, cache: torch.Tensor, form: KVFormat, module=write) -> Callable:
        rows = views(cache, form, self.widths.head_dim)
        return partial(
            module.norm_rope_gate_write,
            self.qkv,
            *self.index[2:4],
            self.main["main_q_norm_weight"],
            self.main["main_k_norm_weight"],
            1e-6,
            rows.keys,
            rows.values,
            self.main["main_slot_mapping"],
            key_scales=rows.key_scales,
            value_scales=rows.value_scales,
        )

    def main_bytes(self, form: KVFormat) -> int:
        """Read the projection, write query, gate and the cache's rows."""
        w = self.widths
        query_gate = 2 * w.q_heads * w.head_dim * 2
        return self.tokens * (self.qkv.shape[1] * 2 + query_gate + w.kv_heads * form.token_bytes(w.head_dim))

    def index_bytes(self) -> int:
        """Read index queries and keys, write the queries; compressed keys and the ring are a quarter of a key."""
        return self.tokens * (2 * 512 * 2 + 128 * 2 * 2)


def differences(step: Step, form: KVFormat) -> dict:
    """Against torch on the same device: numbers of the query that differ, and stored codes that do, and by how much."""
    caches = [step.cache(form) for _ in range(2)]
    (got, _), (want, _) = (step.alone(cache, form, module)() for cache, module in zip(caches, (write, reference)))
    ours, theirs = (views(cache, form, step.widths.head_dim) for cache in caches)
    codes = [(a != b).sum().item() for a, b in zip(ours[:2], theirs[:2])]
    furthest = max(float((a.float() - b.float()).abs().max()) for a, b in zip(ours[:2], theirs[:2]))
    stored = 2 * step.tokens * step.widths.kv_heads * step.widths.head_dim
    return {
        "query_numbers_that_differ": (got != want).float().mean().item(),
        "query_largest_difference": float((got.float() - want.float()).abs().max()),
        "stored_numbers_that_differ": sum(codes) / stored,
        "stored_largest_difference_in_codes": furthest,
    }


def measure(tokens: list[int], widths: Widths, device: str, rate: float | None, e4m3_pointers: bool) -> Iterator[dict]:
    """Rows: ours in every format, upstream's in those that it can write on this card."""
    for count in tokens:
        step = Step(count, widths, device, prompt=count > 64)
        for form in (BF16, FP8, INT8):
            row = {"part": "write", "tokens": count, "format": form.name}
            moved = step.main_bytes(form)
            if form is BF16 or (form is FP8 and e4m3_pointers):
                cache = step.cache(form)
                cache = cache.view(torch.float8_e4m3fn) if form is FP8 else cache
                yield row | {"what": "upstream"} | timed(step.upstream(cache), device, moved + step.index_bytes(), rate)
            cache = step.cache(form)
            both = timed(step.both(cache, form), device, moved + step.index_bytes(), rate)
            yield row | {"what": "both parts"} | both
            alone = timed(step.alone(cache, form), device, moved, rate)
            yield row | {"what": "ours alone"} | alone | differences(step, form)
