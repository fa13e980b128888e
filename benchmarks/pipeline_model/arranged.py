"""Upstream's scheduler with decoding users held in a chosen number of micro-batches.

No policy to serve with: it answers what a number of micro-batches would give, which stock arrives at by chance.
"""

from __future__ import annotations

from collections import Counter

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput


class _Arranged(AsyncScheduler):
    """A request decodes every `pp_size` steps; its first decode is moved to the emptiest group's step."""

    groups = 1

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if not 1 <= self.groups <= self.pp_size:
            raise ValueError(f"{self.groups} groups of users on {self.pp_size} stages; at most one a stage is useful")
        self._group: dict[str, int] = {}

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        self._group = {name: group for name, group in self._group.items() if name in self.requests}
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if not request.is_prefill_chunk:
                request.next_decode_eligible_step = self._next(name, request.next_decode_eligible_step)

    def _next(self, name: str, earliest: int) -> int:
        if name not in self._group:
            held = Counter(self._group.values())
            self._group[name] = min(range(self.groups), key=lambda group: (held[group], group))
        phase = self._group[name] * self.pp_size // self.groups
        return earliest + (phase - earliest) % self.pp_size


def in_groups(groups: int) -> type[AsyncScheduler]:
    """The class that keeps users in `groups` micro-batches: 1 merges all, the number of stages spreads them."""
    return type(f"In{groups}", (_Arranged,), {"groups": groups})
