"""One scheduler that is upstream's or ours, as the first byte of a file says at every step.

Starting an engine costs minutes at real widths, and runs minutes apart differ by more than schedulers do.  So all rules
serve the same users of one engine in turns.  What upstream's scheduler does depends on how users came together: it has
the first turn, from their arrival on.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.core.sched.decode_batches import FixedBatches, MeasuredBatches
from vllm.v1.core.sched.pipeline import AsyncPipelineScheduler, PipelineScheduler
from vllm.v1.core.sched.scheduler import Scheduler

#: Environment variable with the path of the file.
FILE = "PIPELINE_RATES_RULE"
#: Byte -> rule: upstream's scheduler, ours measuring, or ours with a fixed `min_decode_batch`.
RULES = {"u": "upstream", "m": "measured", "1": "spread", "2": "by two", "8": "one micro-batch"}


class _Switched(PipelineScheduler):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._file = os.open(os.environ[FILE], os.O_RDONLY)
        self._rule = ""
        # What was learned stays while another rule has its turn.
        self._measured = MeasuredBatches(self.spread.stages)

    def schedule(self, throttle_prefills: bool = False):
        rule = os.pread(self._file, 1, 0).decode()
        if rule != self._rule:
            self._rule = rule
            if rule != "u":
                self.spread.batches = self._measured if rule == "m" else FixedBatches(self.spread.stages, int(rule))
        if rule == "u":
            return Scheduler.schedule(self, throttle_prefills)
        return super().schedule(throttle_prefills)

    def _mamba_block_aligned_split(self, *args, **kwargs) -> int:
        if self._rule == "u":
            return Scheduler._mamba_block_aligned_split(self, *args, **kwargs)
        return super()._mamba_block_aligned_split(*args, **kwargs)

    def _reserve_prefill_lookahead(self, *args, **kwargs) -> int:
        if self._rule == "u":
            return Scheduler._reserve_prefill_lookahead(self, *args, **kwargs)
        return super()._reserve_prefill_lookahead(*args, **kwargs)


class AsyncSwitched(_Switched, AsyncPipelineScheduler):
    """With asynchronous scheduling, as GPUs have it."""


class Switched(_Switched):
    """Without."""


class Rule:
    """The file's writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("u")
        os.environ[FILE] = str(path)

    def set(self, rule: str) -> None:
        """Raises ValueError: no such rule."""
        if rule not in RULES:
            raise ValueError(f"rule {rule!r}, expected one of {', '.join(RULES)}")
        with open(self.path, "r+b") as file:
            file.write(rule.encode())
