"""Compare a layer with its exact result, and time it."""

from __future__ import annotations

import torch

from benchmarks.format_kernels.layers import Built
from benchmarks.gpu_time import seconds


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
