"""The kernels that take a format: ours with one tile or another, and upstream's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from benchmarks.qsa_kernels.inputs import LAYER_SCALE, Paged, Queries
from vllm.models.qwen4_exp.qsa.attention import sparse_paged_attention
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, KVFormat
from vllm.models.qwen4_exp.qsa.tiles import TILES, Tile


@dataclass(frozen=True)
class Kernel:
    """``named`` are its columns in a sample; ``tile`` is None for upstream's."""

    named: dict[str, str]
    attention: Callable[[Paged, Queries, bool], torch.Tensor]
    tile: Tile | None = None


def ours(tile: Tile) -> Kernel:
    def attention(cache: Paged, asked: Queries, prefill: bool) -> torch.Tensor:
        return sparse_paged_attention(
            asked.q, cache.kv.keys, cache.kv.values, asked.selected, cache.block_table, asked.token_to_req,
            torch.empty_like(asked.q), output_gate=asked.gate, prefill=prefill, tile=tile, **cache.scales,
        )  # fmt: skip

    stages = f"stages {tile.decode_stages}/{tile.prefill_stages}"
    most = f", {tile.registers} registers" if tile.registers else ""
    return Kernel(
        {"kernel": "ours", "tile": f"{tile.block_n}/{tile.split}, {tile.warps} warps, {stages}{most}"}, attention, tile
    )


def upstream(form: KVFormat, device: str) -> Kernel:
    from vllm.models.qwen4_exp.nvidia.ops import qsa

    native = form is FP8 and torch.cuda.get_device_capability(device) >= (8, 9)

    def attention(cache: Paged, asked: Queries, prefill: bool) -> torch.Tensor:
        keys, values = cache.kv.keys, cache.kv.values
        if native:
            keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
        scale = LAYER_SCALE if form is FP8 else None
        return qsa.qsa_sparse_paged_attention(
            asked.q, keys, values, asked.selected, cache.block_table, asked.token_to_req, prefill, None, scale, scale,
            output_gate=asked.gate,
        )  # fmt: skip

    return Kernel({"kernel": "upstream"}, attention)


def kernels(form: KVFormat, device: str, tiles: list[Tile]) -> Iterator[Kernel]:
    """Upstream's first where it takes the format (e4m3 is decoded in PTX, which no interpreter knows)."""
    if form is BF16 or (form is FP8 and device != "cpu"):
        yield upstream(form, device)
    assert form in (BF16, FP8, INT8)
    yield from map(ours, tiles)


def candidates(form: KVFormat) -> list[Tile]:
    """What a sweep tries: the table's, and few others, by what they compile to (`compiled.py`)."""
    one_byte = ((64, 128, 8, 2, 128), (64, 64, 8, 2, 128), (64, 128, 4, 2, 168), (64, 128, 4, 3), (128, 128, 8, 2))
    more = ((64, 128, 2, 2), (64, 128, 4, 2), (64, 128, 8, 2, 128)) if form is BF16 else one_byte
    tried = [Tile(n, split, warps, stages, stages, *most) for n, split, warps, stages, *most in more]
    return list(dict.fromkeys([tile for (_, of), tile in TILES.items() if of is form] + tried))


def without_columns(asked: Queries) -> Queries:
    """The same rows with nothing selected."""
    selected = torch.full_like(asked.selected, -1)
    selected[:, -1] = 0
    return replace(asked, selected=selected)


def compile_all(tiles: list[Tile], cache: Paged, asked: Queries) -> None:
    """Let several threads compile what will be timed; whatever does not compile fails again when it is timed.

    They launch it as well, over one workspace, where each would read places and states that another writes: so rows have
    no columns, and end before that.
    """
    asked = without_columns(asked)

    def one(job: tuple[Tile, bool]) -> None:
        with contextlib.suppress(Exception):
            ours(job[0]).attention(cache, asked, job[1])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, itertools.product(tiles, (False, True))))
