"""One row's times."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.gpu_time import cold_in_graph, in_graph


def timed(call: Callable[[], object], device: str, moved: int, rate: float | None) -> dict:
    """Fields of a row: microseconds cold (all samples) and in a graph, bytes, and the floor that those set."""
    samples = cold_in_graph(call, device)
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
