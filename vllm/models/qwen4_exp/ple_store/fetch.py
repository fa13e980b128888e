# SPDX-License-Identifier: Apache-2.0
"""Rows of a step, and those of the step after it while this one is computed."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from .counters import Counters
from .errors import PLEStoreError
from .reader import RowStore


class Ahead:
    """Rows that are being read ahead.

    Attributes:
        numbers: of the rows, sorted; None as long as they have not been looked at
        records: uint8 ``[rows, row_bytes]`` in the end; None where they could not be read
    """

    def __init__(self, ids: np.ndarray, store: RowStore, thread: ThreadPoolExecutor) -> None:
        self.numbers: np.ndarray | None = None
        self.records: Future[torch.Tensor | None] = thread.submit(self._read, ids, store)

    def _read(self, ids: np.ndarray, store: RowStore) -> torch.Tensor | None:
        numbers = self.numbers = np.unique(ids)
        try:
            return store.read(numbers)
        except PLEStoreError:
            # If the rows are wanted indeed, reading them then will fail again, and be heard.
            return None

    def find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Where in ``records`` wanted rows are, and which of them are there; None where it does not pay to wait."""
        if self.numbers is None or not len(self.numbers):
            return None
        at = np.minimum(np.searchsorted(self.numbers, wanted), len(self.numbers) - 1)
        found = self.numbers[at] == wanted
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

    def fetch(self, ids: np.ndarray) -> torch.Tensor:
        """Records of rows in any order.

        Args:
            ids: int64, any shape

        Returns:
            uint8 ``[*ids.shape, row_bytes]``

        Raises:
            RowOutOfRange, RowReadFailed
        """
        begun = time.perf_counter()
        wanted, where = np.unique(ids, return_inverse=True)
        records = self._read(wanted)
        picked = records[torch.from_numpy(where.reshape(-1))].view(*ids.shape, self.store.table.row_bytes)
        self.counters.add(rows=ids.size, unique_rows=len(wanted), row_wait_seconds=time.perf_counter() - begun, steps=1)
        return picked

    def read_ahead(self, ids: np.ndarray) -> None:
        """Begin to read rows that a later ``fetch`` will want; replaces what was read ahead before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ngram-ahead")
        self._ahead = Ahead(ids, self.store, self._thread)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self.store.close()

    def _read(self, wanted: np.ndarray) -> torch.Tensor:
        place = self._ahead.find(wanted) if self._ahead is not None and len(wanted) else None
        records = self._ahead.records.result() if place is not None else None
        if records is None:
            return self.store.read(wanted)
        at, found = place
        self.counters.add(ahead_rows=int(found.sum()))
        if found.all():
            return records[torch.from_numpy(at)]
        made = torch.empty(len(wanted), records.shape[1], dtype=torch.uint8)
        made[torch.from_numpy(found)] = records[torch.from_numpy(at[found])]
        made[torch.from_numpy(~found)] = self.store.read(wanted[~found])
        return made
