"""Compare a layer with its exact result, and time it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.format_kernels.layers import Built

REPEATS = 20
#: More than any card's last-level cache (H200: 50 MB): written before each call, so that weights come from memory.
FLUSH_BYTES = 256 << 20


def bandwidth(device: str) -> float | None:
    """Bytes a second that a large copy reads and writes; None on a CPU, whose times mean nothing here."""
    if device == "cpu":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def seconds(call: Callable[[], object], device: str) -> float:
    """Median time of a call with cold caches; on a GPU from events, without the host's part."""
    for _ in range(3):
        call()
    if device == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(REPEATS):
        # While the GPU writes this, the host gets ahead: launches are queued when the first event is reached.
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


@torch.inference_mode()
def sample(built: Built, tokens: int, device: str, rate: float | None) -> dict:
    """One row: errors, microseconds, and the floor that reading the weights and moving the activations sets."""
    inputs = built.inputs(tokens)
    got, want = built.run(*inputs).float(), built.reference(*inputs)
    error = (got - want).abs()
    moved = built.weight_bytes(*inputs) + inputs[0].nbytes + 2 * want.numel()
    row = {
        "tokens": tokens,
        "largest": float(error.max()),
        # against the size of a result, so that widths compare
        "relative": float(error.norm() / want.norm()),
        "microseconds": seconds(lambda: built.run(*inputs), device) * 1e6,
        "bytes": moved,
    }
    if rate:
        row["floor_microseconds"] = moved / rate * 1e6
    if built.plain is not None:
        row["bf16_microseconds"] = seconds(lambda: built.plain(*inputs), device) * 1e6
    return row
