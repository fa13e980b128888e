"""How long one stage's GPU is busy with one micro-batch.

Two ways to say it with one interface: `Roofline` from bytes and operations, `Measured` from a table of a real run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import model


@dataclass(frozen=True)
class Row:
    """One request in a micro-batch: `tokens` computed now, the last of them at position `context` (from one)."""

    tokens: int
    context: int


class StageCost(Protocol):
    @property
    def stages(self) -> int: ...

    def gpu_ms(self, stage: int, rows: Sequence[Row]) -> float:
        """Milliseconds for which `stage` is busy with `rows`; `rows` is not empty."""
        ...


@dataclass(frozen=True)
class Roofline:
    """Bytes over a bandwidth or operations over a rate, whichever takes longer, and a constant.

    Attributes:
        layers: decoder layers of each stage.
        weights: the checkpoint's bytes.
        bandwidth_gbs: the card's nominal memory bandwidth in GB/s.
        efficiency: the share of it that weights and state are read with.
        tflops: operations that prefill reaches, in 1e12 a second.
        fixed_ms: what a micro-batch takes on a stage beyond that: small kernels, waiting for launches, hand-over.
        host_rows_gbs: where K and V lie in host memory, the rate at which selected rows come from it; None: on the card.
    """

    layers: tuple[int, ...]
    weights: model.Checkpoint
    bandwidth_gbs: float
    efficiency: float
    tflops: float
    fixed_ms: float
    host_rows_gbs: float | None = None

    @property
    def stages(self) -> int:
        return len(self.layers)

    def gpu_ms(self, stage: int, rows: Sequence[Row]) -> float:
        share = self.layers[stage] / model.LAYERS
        seconds = max(
            self.read_bytes(stage, rows) / (self.bandwidth_gbs * 1e9 * self.efficiency),
            share * operations(rows) / (self.tflops * 1e12),
        )
        if self.host_rows_gbs is not None:
            seconds += share * selected_bytes(rows) / (self.host_rows_gbs * 1e9)
        return self.fixed_ms + 1e3 * seconds

    def read_bytes(self, stage: int, rows: Sequence[Row]) -> float:
        """Weights and state that `stage` reads from its own memory for `rows`."""
        share = self.layers[stage] / model.LAYERS
        weights = self.weights.dense - self.weights.head + experts_read(rows) * self.weights.expert
        state = sum(model.RECURRENT_BYTES + row.context * model.POOLED_BYTES for row in rows)
        if self.host_rows_gbs is None:
            state += selected_bytes(rows)
        return share * (weights + state) + (self.weights.head if stage == self.stages - 1 else 0.0)


def experts_read(rows: Sequence[Row]) -> float:
    """Different experts a layer reads, expected where tokens choose independently of each other."""
    tokens = sum(row.tokens for row in rows)
    return model.EXPERTS * (1 - (1 - model.EXPERTS_PER_TOKEN / model.EXPERTS) ** tokens)


def selected_bytes(rows: Sequence[Row]) -> float:
    """Rows of K and V read in all layers: each token's selection, and none of the context twice."""
    return model.ROW_BYTES * sum(min(row.context, row.tokens * model.SELECTED_ROWS) for row in rows)


def operations(rows: Sequence[Row]) -> float:
    """Floating-point operations in all layers."""
    return sum(row.tokens * (model.FLOP + row.context * model.SCORE_FLOP) for row in rows)


@dataclass(frozen=True)
class Measured:
    """Stage times read off a run.

    Attributes:
        stages: pipeline stages, all alike.
        decode_ms: decoding rows in a micro-batch -> milliseconds; straight lines between, and beyond the last two.
        prefill_ms: milliseconds for each token of a prefill chunk, added to what the decoding rows take.
    """

    stages: int
    decode_ms: Mapping[int, float]
    prefill_ms: float = 0.0

    def __post_init__(self) -> None:
        if 1 not in self.decode_ms:
            raise ValueError(f"a table of stage times starts with one row, this one has {sorted(self.decode_ms)}")

    def gpu_ms(self, stage: int, rows: Sequence[Row]) -> float:
        decoding = sum(1 for row in rows if row.tokens == 1)
        chunk = sum(row.tokens for row in rows if row.tokens > 1)
        return (self._decode(decoding) if decoding else 0.0) + chunk * self.prefill_ms

    def _decode(self, rows: int) -> float:
        known = sorted(self.decode_ms)
        if rows in self.decode_ms or len(known) == 1:
            return self.decode_ms.get(rows, self.decode_ms[known[0]])
        above = next((at for at in known if at > rows), known[-1])
        below = known[known.index(above) - 1]
        slope = (self.decode_ms[above] - self.decode_ms[below]) / (above - below)
        return self.decode_ms[below] + slope * (rows - below)
