"""Seconds of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 20
#: Calls in one graph: a launch of a graph costs as much as a small kernel.
IN_GRAPH = 20
#: More than any card's last-level cache (H200: 50 MB).
_FLUSH_BYTES = 256 << 20


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
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in pairs:
        # While the GPU writes this, the host gets ahead.
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def in_graph(call: Callable[[], object], device: str) -> float | None:
    """Seconds of one of many calls inside a CUDA graph, as decode steps run; None on a CPU."""
    if device == "cpu":
        return None
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(IN_GRAPH):
            call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / IN_GRAPH)
    return statistics.median(times)


def copy_rate(device: str) -> float | None:
    """Bytes a second that a large copy reads and writes; None on a CPU."""
    if device == "cpu":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(cold(lambda: target.copy_(source), device))


def timed(call: Callable[[], object], device: str, moved: int, rate: float | None) -> dict:
    """Fields of a row: microseconds cold (all samples) and in a graph, bytes, and the floor that those set."""
    samples = cold(call, device)
    graph = in_graph(call, device)
    row: dict = {
        "microseconds": statistics.median(samples) * 1e6,
        "samples_microseconds": [round(s * 1e6, 2) for s in samples],
        "bytes": moved,
    }
    if graph is not None:
        row["graph_microseconds"] = graph * 1e6
    if rate:
        row["floor_microseconds"] = moved / rate * 1e6
    return row
