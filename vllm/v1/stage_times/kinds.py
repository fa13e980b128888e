# SPDX-License-Identifier: Apache-2.0
"""Kinds of steps: what a micro-batch holds decides what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

DECODE = "decode"
#: At least one request has a part of its prompt, or of what it loses to preemption, computed.
PREFILL = "prefill"
#: The scheduler found nothing to do.
EMPTY = "empty"
#: Engine core: nothing was scheduled, a result was taken in.
DRAIN = "drain"
#: Stage: a call that is no step.
CALL = "call"


def kind_of(output: SchedulerOutput) -> str:
    if not output.total_num_scheduled_tokens:
        return EMPTY
    cached = output.scheduled_cached_reqs
    if output.scheduled_new_reqs or cached.resumed_req_ids or 0 in cached.num_output_tokens:
        return PREFILL
    return DECODE
