"""What it costs a step to know that its logits are numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.qsa_write_select.timing import timed
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.damaged_logits import count_damaged
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.withheld import withhold


def measure(users: list[int], vocabulary: int, device: str, rate: float | None) -> Iterator[dict]:
    """Rows: upstream's count of NaNs, and ours of NaN and infinity with what is withheld because of it."""
    for rows in users:
        logits = torch.randn(rows, vocabulary, device=device).bfloat16()
        ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        sampled = torch.ones(rows, dtype=torch.int32, device=device)

        def ours(logits=logits, ends=ends, sampled=sampled) -> None:
            withhold(SamplerOutput(None, None, count_damaged(logits), sampled, sampled), ends)

        row = {"part": "guard", "rows": rows}
        if device != "cpu":  # upstream's kernel needs libdevice
            yield row | {"what": "upstream"} | timed(partial(get_num_nans, logits), device, logits.nbytes, rate)
        yield row | {"what": "ours"} | timed(ours, device, logits.nbytes, rate)
