# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph capture sizes for the decode batches that a pipeline of this model can form.

A decode batch of n users has n × (1 + draft length) rows. With N users (`max_num_seqs`) on S stages an even spread
makes batches of ceil(N / S), but every n from 1 to N is reachable: users arrive and leave, and what is in flight on
another stage is not the scheduler's to move. A batch that no graph holds runs eagerly: on three 3090s a fourth user
took a step from 25 to 110 ms, because only size 1 was captured.

Upstream's defaults cover one row a user up to 512 rows, at 1, 2, 4 and multiples of 8. Two things are added: the
small sizes between, since padding rows pass through all layers and their experts as real ones do, and sizes above 512
rows where users and drafts need them. What a user configures is never changed; what it leaves out is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.ampere.checkpoint.config import ARCHITECTURES
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# Batches up to here get a graph of exactly their size, or up to the even spread if that is not much larger. Not for
# all: each graph takes memory, as published 0.06 GiB for three of them on a stage of 16 layers.
_EXACT = 8
_EXACT_SPREAD = 16
# Above upstream's largest size, each further one adds an eighth: padding stays below that, and graphs stay few.
_GROWTH = 8


@dataclass(frozen=True)
class Load:
    """What a stage can be asked to decode at once."""

    users: int
    """max_num_seqs"""
    stages: int
    rows: int
    """rows of each user in a decode step: one token and its drafts"""
    budget: int
    """max_num_batched_tokens"""

    @property
    def widest(self) -> int:
        """Users of the largest batch. The token budget can hold fewer than there are."""
        return min(self.users, self.budget // self.rows)

    @property
    def spread(self) -> int:
        """Users in each batch when all are spread evenly."""
        return min(self.widest, -(-self.users // self.stages))


@dataclass(frozen=True)
class Missing:
    """Batches that no graph holds, in users, ascending."""

    eager: tuple[int, ...]
    piecewise: tuple[int, ...]
    """held by a piecewise graph only, where other batches have a full one"""


def wanted_sizes(load: Load, above: int = 0) -> list[int]:
    """Capture sizes, in rows, ascending: small batches exactly, then every reachable one that `above` rows do not hold.

    `above` is the largest size that is captured anyway; 0 makes the list cover every batch by itself.
    """
    exact = load.spread if _EXACT < load.spread <= _EXACT_SPREAD else _EXACT
    counts = set(range(1, min(exact, load.widest) + 1))
    count = max(exact, above // load.rows)
    while count < load.widest:
        count = min(load.widest, count + max(1, count // _GROWTH))
        counts.add(count)
    return sorted(count * load.rows for count in counts)


def missing_graphs(load: Load, mode: CUDAGraphMode, sizes: list[int]) -> Missing:
    """Reachable batches that `sizes` leave without a graph, by the rules of the V2 runner's graph manager.

    It rounds a size up to whole users for full decode graphs, and then drops it when it exceeds the largest size or
    all users: [1, 2, 4, 8] holds no batch of 5 or 6 of 6 users. Mode FULL comes out as FULL_DECODE_ONLY, since this
    model's attention cannot have its mixed batches in full graphs.
    """
    largest = max(sizes, default=0)
    mixed = largest if mode.mixed_mode() == CUDAGraphMode.PIECEWISE else 0
    decode = mixed
    if mode.decode_mode() == CUDAGraphMode.FULL:
        rounded = [-(-size // load.rows) * load.rows for size in sizes]
        decode = max((size for size in rounded if size <= min(largest, load.users * load.rows)), default=0)
    batches = range(1, load.widest + 1)
    return Missing(
        eager=tuple(n for n in batches if n * load.rows > max(decode, mixed)),
        piecewise=tuple(n for n in batches if decode < n * load.rows <= mixed),
    )


def set_capture_sizes(vllm_config: VllmConfig) -> None:
    """Upstream's sizes; for this model also those it lacks, or a warning where the user chose the sizes."""
    compilation = vllm_config.compilation_config
    chosen = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    compile_sizes = compilation.compile_sizes
    vllm_config._set_cudagraph_sizes()
    load = load_of(vllm_config)
    # Without graphs upstream leaves an empty list.
    if load is None or not compilation.cudagraph_capture_sizes:
        return
    if chosen == (None, None):
        more = wanted_sizes(load, above=compilation.cudagraph_capture_sizes[-1])
        # As if the user had listed all of them. compile_sizes may refer to the list and is resolved beside it.
        compilation.cudagraph_capture_sizes = sorted({*compilation.cudagraph_capture_sizes, *more})
        compilation.max_cudagraph_capture_size = None
        compilation.compile_sizes = compile_sizes
        vllm_config._set_cudagraph_sizes()
    missing = missing_graphs(load, compilation.cudagraph_mode, compilation.cudagraph_capture_sizes)
    if missing.eager or missing.piecewise:
        logger.warning_once(describe(load, missing, compilation.cudagraph_capture_sizes))


def load_of(vllm_config: VllmConfig) -> Load | None:
    """The load of one of this model's configurations; none for other models."""
    if vllm_config.model_config is None or vllm_config.model_config.architecture not in ARCHITECTURES:
        return None
    return Load(
        users=vllm_config.scheduler_config.max_num_seqs,
        stages=vllm_config.parallel_config.pipeline_parallel_size,
        rows=vllm_config.uniform_decode_query_len,
        budget=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def describe(load: Load, missing: Missing, sizes: list[int]) -> str:
    """One sentence: which batches are slow, and which list would hold them."""
    parts = []
    if missing.eager:
        parts.append(f"of {listing(missing.eager)} users run eagerly, several times slower")
    if missing.piecewise:
        parts.append(f"of {listing(missing.piecewise)} users run in piecewise graphs, slower than full ones")
    better = sorted({*wanted_sizes(load), *(size for size in sizes if size <= load.widest * load.rows)})
    rows = f" × {load.rows} rows" if load.rows > 1 else ""
    return (
        f"Decode batches {' and batches '.join(parts)}: cudagraph_capture_sizes {sizes} does not hold every batch of up "
        f"to {load.widest} users{rows} (an even spread over {load.stages} pipeline stages makes batches of "
        f"{load.spread}); {better} would, or leave the option out, or lower --max-num-seqs ({load.users}) to the users "
        "you expect"
    )


def listing(counts: tuple[int, ...]) -> str:
    """'3', or '2 to 4': the batches of one kind follow one another."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
