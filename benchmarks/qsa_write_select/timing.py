"""Seconds of a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.gpu_time import REPEATS, cold

#: Calls in one graph: a launch of a graph costs as much as a small kernel.
IN_GRAPH = 20


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
