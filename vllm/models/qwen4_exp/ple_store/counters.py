# SPDX-License-Identifier: Apache-2.0
"""What reading rows has cost so far, in this process."""

import threading
from dataclasses import dataclass, field, fields

import numpy as np

from .reads import Outcome, Spans


@dataclass
class Counters:
    """Sums since the process began; ``vllm/v1/metrics/ngram_table.py`` has each name, with a sentence for ``/metrics``.

    Attributes:
        steps: forwards whose rows were staged, made-up batches left out
        rows: that these needed, repeats included
        unique_rows: read for them, each once a step
        requested_bytes: of the unique rows, as asked from the kernel
        cached_reads, missed_reads: reads that were, and were not, answered from the page cache; both stay 0 where the
            kernel does not tell
        disk_bytes: pages of 4 KiB that the missed reads needed
        ahead_rows: of the unique rows, those that had been read while the step before was computed
        token_wait_seconds: waited for sampled tokens to reach the host
        row_wait_seconds: waited for rows
        failures: steps that were given up because rows could not be read
    """

    steps: int = 0
    rows: int = 0
    unique_rows: int = 0
    requested_bytes: int = 0
    cached_reads: int = 0
    missed_reads: int = 0
    disk_bytes: int = 0
    ahead_rows: int = 0
    token_wait_seconds: float = 0.0
    row_wait_seconds: float = 0.0
    failures: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Add to several at once; rows read ahead are counted by another thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def count_reads(self, spans: Spans, outcome: Outcome) -> None:
        hits = 0 if outcome.cached is None else int(np.count_nonzero(outcome.cached))
        self.add(
            requested_bytes=int(spans.size.sum()),
            cached_reads=hits,
            missed_reads=0 if outcome.cached is None else len(spans) - hits,
            disk_bytes=outcome.disk_bytes,
        )

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("_")}
