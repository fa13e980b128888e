"""The two schedulers that are compared, writing down what goes into each micro-batch."""

from __future__ import annotations

import json
import os
import time

from vllm.v1.core.sched.pipeline import PipelineScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .clients import FILE


class Watched:
    """Mixed into a scheduler: a line for each step that has work.

    {"at": seconds, "decodes": requests that decode, "requests": all, "tokens": of all}
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._lines = open(os.environ[FILE], "w", buffering=1)

    def schedule(self, *args, **kwargs):
        decoding = {request.request_id for request in self.running if not request.is_prefill_chunk}
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        if scheduled:
            line = {
                "at": time.time(),
                "decodes": len(decoding & scheduled.keys()),
                "requests": len(scheduled),
                "tokens": sum(scheduled.values()),
            }
            self._lines.write(json.dumps(line) + "\n")
        return output


class WatchedUpstream(Watched, Scheduler):
    pass


class WatchedPipeline(Watched, PipelineScheduler):
    pass
