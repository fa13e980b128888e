"""The pipeline scheduler, writing down how it cuts prompts; and what a prompt's cuts were, cached parts included.

A line for each step: which requests computed how many tokens of their prompts from which position.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path

from vllm.v1.core.sched.pipeline import AsyncPipelineScheduler, PipelineScheduler

#: Where to; the engine core, which has the scheduler, inherits it.
FILE = "STRESS_CUTS"

Cuts = tuple[int, ...]  # where a prompt's chunks begin, without 0


class RecordingScheduler(PipelineScheduler):
    def __new__(cls, vllm_config, *args, **kwargs) -> RecordingScheduler:
        if cls is RecordingScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = AsyncRecordingScheduler
        return super().__new__(cls, vllm_config, *args, **kwargs)

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._cuts = open(os.environ[FILE], "w", buffering=1)

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        chunks = {}
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            start = request.num_computed_tokens - tokens  # counted already
            if start < request.num_prompt_tokens:
                chunks[name] = start, tokens
        if chunks:
            self._cuts.write(json.dumps(chunks) + "\n")
        return output


class AsyncRecordingScheduler(RecordingScheduler, AsyncPipelineScheduler):
    pass


class Histories:
    """For each request the cuts of its prompt that there may have been.

    More than one where its beginning came from the prefix cache: that lies there as some request with the same prompt
    computed it, and which one is not known.
    """

    def __init__(self, path: Path, prompts: dict[str, Hashable]) -> None:
        """`path` is what the scheduler wrote; requests, by name, with equal `prompts` may have them from each other."""
        chunks: dict[str, list[tuple[int, int]]] = {}
        for line in path.read_text().splitlines():
            for name, (start, tokens) in json.loads(line).items():
                # The engine gives a name a suffix.
                found = chunks.setdefault(name.rsplit("-", 1)[0], [])
                if found and start < sum(found[-1]):
                    found.clear()  # preempted, and computed again
                found.append((start, tokens))
        self._of: dict[str, list[Cuts]] = {}
        # prompt -> cuts of a request before, and how far it came
        earlier: dict[Hashable, list[tuple[Cuts, int]]] = {}
        for name, found in chunks.items():
            before = earlier.setdefault(prompts[name], [])
            cached = found[0][0]
            own = tuple(start for start, _ in found if start)
            begun = (
                {tuple(at for at in cuts if at < cached) for cuts, end in before if end >= cached} if cached else {()}
            )
            self._of[name] = [cuts + own for cuts in sorted(begun)]
            # Aborted or not, what it computed is in the cache.
            before += [(cuts, sum(found[-1])) for cuts in self._of[name]]

    def __getitem__(self, name: str) -> list[Cuts]:
        return self._of[name]
