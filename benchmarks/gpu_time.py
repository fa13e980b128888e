"""Seconds of a call on a GPU, without the host's part, and how fast its memory is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 20
#: Calls in one graph: a launch of a graph costs as much as a small kernel.
IN_GRAPH = 20
#: More than any card's last-level cache (H200: 50 MB): written before each call, so that what it reads comes from memory.
FLUSH_BYTES = 256 << 20


def cold(call: Callable[[], object], device: str) -> list[float]:
    """Each of `REPEATS` calls with cold caches, launched ahead: the GPU's part. On a CPU three calls, by the clock."""
    for _ in range(3):
        call()
    if device == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in pairs:
        # While the GPU writes this, the host gets ahead.
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def seconds(call: Callable[[], object], device: str) -> float:
    """The middle one of `cold`."""
    return statistics.median(cold(call, device))


def captured(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """``calls`` calls as one CUDA graph: replaying it costs the host a few microseconds, whatever a call costs it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            call()
    return graph


def in_graph(call: Callable[[], object], device: str, calls: int = IN_GRAPH, repeats: int = REPEATS) -> float | None:
    """Seconds of one of many calls inside a CUDA graph, as decode steps run; None on a CPU."""
    if device == "cpu":
        return None
    graph = captured(call, calls)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def cold_in_graph(call: Callable[[], object], device: str) -> list[float]:
    """`cold` of a call that is a graph of its own: the GPU's part, however long the host takes to launch it."""
    return cold(call if device == "cpu" else captured(call, 1).replay, device)


def bandwidth(device: str) -> float | None:
    """Bytes a second that a large copy reads and writes; None on a CPU, whose times mean nothing here."""
    if device == "cpu":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
