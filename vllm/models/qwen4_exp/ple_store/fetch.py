# SPDX-License-Identifier: Apache-2.0
"""Rows of a step, and those of the step after it while this one is computed."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from .counters import Counters
from .errors import PLEStoreError
from .reader import RowStore


class Fetched(NamedTuple):
    """Rows as they were read, each once, and what asks for them.

    A step of a long prompt asks for each row once or many times; what repeats them is left to the device, which takes
    microseconds for what took one thread of the host 14 ms a chunk of 2048 tokens (an H200's host).

    Attributes:
        parts: uint8 ``[rows, row_bytes]`` each, one or two
        index: int64 of the shape that was asked for: numbers of rows in the parts, one after the other
    """

    parts: list[torch.Tensor]
    index: np.ndarray

    def records(self) -> torch.Tensor:
        """uint8 ``[*index.shape, row_bytes]``, repeated here."""
        rows = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return rows[torch.from_numpy(self.index.reshape(-1))].view(*self.index.shape, rows.shape[1])


class Asked(NamedTuple):
    """Numbers of rows: ``ids`` int64 of any shape, ``numbers`` each once and sorted, ``where`` in these each id is."""

    ids: np.ndarray
    numbers: np.ndarray
    where: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray) -> "Asked":
        numbers, where = np.unique(ids, return_inverse=True)
        return cls(ids, numbers, where.reshape(ids.shape))


class Ahead:
    """Rows that are being read ahead.

    Attributes:
        asked: which; None as long as they have not been looked at
        records: uint8 ``[rows, row_bytes]`` in the end; None where they could not be read
    """

    def __init__(self, ids: Callable[[], np.ndarray], store: RowStore, thread: ThreadPoolExecutor) -> None:
        self.asked: Asked | None = None
        self.records: Future[torch.Tensor | None] = thread.submit(self._read, ids, store)

    def _read(self, ids: Callable[[], np.ndarray], store: RowStore) -> torch.Tensor | None:
        self.asked = Asked.of(ids())
        try:
            return store.read(self.asked.numbers)
        except PLEStoreError:
            # If the rows are wanted indeed, reading them then will fail again, and be heard.
            return None

    def exactly(self, ids: np.ndarray) -> Asked | None:
        """What was asked, if it is just this: then it is sorted already."""
        return self.asked if self.asked is not None and np.array_equal(self.asked.ids, ids) else None

    def find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Where in ``records`` wanted rows are, and which of them are there; None where it does not pay to wait."""
        if self.asked is None or not len(self.asked.numbers):
            return None
        numbers = self.asked.numbers
        at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        found = numbers[at] == wanted
        # A step of somebody else, such as decoding beside a long prompt, must not wait for that prompt's next chunk.
        enough = found.any() if self.records.done() else 2 * found.sum() > len(wanted)
        return (at, found) if enough else None


class RowFetcher:
    """Reads through a store, and ahead of it.

    Rows read ahead are looked up by their number, not by whose they are meant to be: a scheduler that cuts the next
    chunk elsewhere, preempts or aborts changes which of them are used, never what is in them.
    """

    def __init__(self, store: RowStore, counters: Counters) -> None:
        self.store = store
        self.counters = counters
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: Ahead | None = None

    def fetch(self, ids: np.ndarray) -> Fetched:
        """Rows in any order.

        Args:
            ids: int64, any shape

        Raises:
            RowOutOfRange, RowReadFailed
        """
        begun = time.perf_counter()
        asked = self._ahead.exactly(ids) if self._ahead is not None else None
        fetched = self._as_foreseen(asked) if asked is not None else None
        if fetched is None:
            asked = Asked.of(ids)
            fetched = self._read(asked)
        seconds = time.perf_counter() - begun
        self.counters.add(rows=ids.size, unique_rows=len(asked.numbers), row_wait_seconds=seconds, steps=1)
        return fetched

    def read_ahead(self, ids: Callable[[], np.ndarray]) -> None:
        """Begin to read rows that a later ``fetch`` will want; replaces what was read ahead before.

        Args:
            ids: gives their numbers, int64 of any shape; called by another thread
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ngram-ahead")
        self._ahead = Ahead(ids, self.store, self._thread)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self.store.close()

    def _as_foreseen(self, asked: Asked) -> Fetched | None:
        """All that was read ahead, as every chunk of a long prompt but the first wants it; None if it could not be read."""
        records = self._ahead.records.result()
        if records is None:
            return None
        self.counters.add(ahead_rows=len(records))
        return Fetched([records], asked.where)

    def _read(self, asked: Asked) -> Fetched:
        wanted = asked.numbers
        place = self._ahead.find(wanted) if self._ahead is not None and len(wanted) else None
        records = self._ahead.records.result() if place is not None else None
        if records is None:
            return Fetched([self.store.read(wanted)], asked.where)
        at, found = place
        here = int(found.sum())
        self.counters.add(ahead_rows=here)
        if 2 * here < len(records):
            # Few of them: the others need not travel to the device.
            records, at = records[torch.from_numpy(at[found])], np.cumsum(found) - 1
        if here == len(wanted):
            return Fetched([records], at[asked.where])
        behind = len(records) + np.cumsum(~found) - 1
        return Fetched([records, self.store.read(wanted[~found])], np.where(found, at, behind)[asked.where])
