# SPDX-License-Identifier: Apache-2.0
"""What a recorder holds, as figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.stage_times.recorder import Recorder, Series

logger = init_logger(__name__)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of a sorted sequence lies, interpolated between neighbours as numpy does."""
    at = (len(values) - 1) * share
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def describe(series: Series) -> dict[str, float]:
    """Milliseconds; percentiles of the last recorder.KEPT."""
    kept = sorted(series.kept)
    return {
        "count": series.count,
        "total_ms": round(series.total * 1e3, 4),
        "mean_ms": round(series.total / series.count * 1e3, 4),
        "p50_ms": round(percentile(kept, 0.5) * 1e3, 4),
        "p90_ms": round(percentile(kept, 0.9) * 1e3, 4),
    }


def summarise(recorder: Recorder, gpu: dict[str, dict[str, Series]] | None = None) -> dict[str, Any]:
    """A recorder as JSON.

    Args:
        gpu: by kind of step and name, what a GPU did meanwhile; not part of the sum

    Returns: `part`; `seconds`, which the steps fill; `steps` by kind, each with `whole`, `phases` and `gpu`.
    """
    gpu = gpu or {}
    return {
        "part": recorder.part,
        "seconds": round(recorder.ended - recorder.began, 6),
        "steps": {
            kind: {
                "whole": describe(whole),
                "phases": {phase: describe(series) for phase, series in list(recorder.phases.get(kind, {}).items())},
                "gpu": {name: describe(series) for name, series in gpu.get(kind, {}).items()},
            }
            # Copied, because the thread whose recorder it is may go on.
            for kind, whole in list(recorder.wholes.items())
        },
    }


class Log:
    """Writes a line for each kind of step every VLLM_LOG_STATS_INTERVAL seconds in which there were any."""

    def __init__(self, recorder: Recorder) -> None:
        self.interval = envs.VLLM_LOG_STATS_INTERVAL
        self.since = recorder.clock()
        self.seen: dict[tuple[str, str | None], tuple[int, float]] = {}
        recorder.after_step = self

    def __call__(self, recorder: Recorder) -> None:
        if recorder.ended - self.since < self.interval:
            return
        seconds, self.since = recorder.ended - self.since, recorder.ended
        for kind, whole in recorder.wholes.items():
            steps, total = self._new(kind, None, whole)
            if steps <= 0:
                continue
            phases = {name: self._new(kind, name, series)[1] for name, series in recorder.phases[kind].items()}
            parts = ", ".join(
                f"{name} {spent / steps * 1e3:.2f}" for name, spent in sorted(phases.items(), key=lambda item: -item[1])
            )
            logger.info(
                "%s: %d %s steps in %.0f s, %.2f ms each: %s",
                recorder.part,
                steps,
                kind,
                seconds,
                total / steps * 1e3,
                parts,
            )

    def _new(self, kind: str, phase: str | None, series: Series) -> tuple[int, float]:
        """What came since the last line."""
        count, total = self.seen.get((kind, phase), (0, 0.0))
        if series.count < count:  # reset in between
            count, total = 0, 0.0
        self.seen[kind, phase] = series.count, series.total
        return series.count - count, series.total - total
