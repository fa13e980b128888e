# SPDX-License-Identifier: Apache-2.0
"""The n-gram embedding layer without a weight.

Rows come in two steps.  Before the forward ``stage`` reads them from the files, turns
them into activations and puts these into ``rows``, a buffer that never moves; during
the forward ``finalize_prefetch`` gives out a view of it.  Nothing in between touches a
file or waits for the host, so the forward can be captured in a CUDA graph.
"""

import weakref
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from vllm.config import EngramConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available

from ..common import ngram_embedding as upstream
from .counters import Counters
from .errors import RowReadFailed, TableNotLoadable
from .fetch import Fetched, RowFetcher
from .flat.reader import open_flat
from .formats import Kind, dequantize, locate_table
from .locate import TableShape
from .methods import warn_of_contradiction
from .pinned import Qwen4ExpPLEExactPinnedEmbedding
from .reader import RowStore, TableReader
from .source import layer_name, model_folder, table_shape

logger = init_logger(__name__)

#: Rows of a step up to which they are repeated on the host: one copy to the device instead of two and a launch.
_FEW = 1024


class Qwen4ExpPLEFileEmbedding(upstream.Qwen4ExpPLEEmbedding):
    """A table whose rows are read from files.

    Every rank of a tensor-parallel group reads all rows that it needs: 5 KiB per token
    and rank, against an all-reduce of the same size.

    Attributes:
        rows: ``[max_total_tokens, num_ngram_heads, embedding_dim]`` on the device, in
            the activations' dtype; the rows of the step at hand
        weight: a ``meta`` tensor of the shape of the rank's part of the table, for
            those who ask for it.  It is no parameter: nothing loads, moves, counts or
            saves it.
    """

    supports_prefetch: ClassVar[bool] = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        prefix: str,
        embedding_method: upstream.Qwen4ExpPLEEmbeddingMethod,
        num_ngram_heads: int = 1,
        max_total_tokens: int = 0,
        reduce_results: bool = True,
        **rest: Any,
    ) -> None:
        """Open the table; everything that can be wrong with it shows here.

        Args:
            num_embeddings: rows of the table, padding included
            embedding_dim: values per row
            max_total_tokens: tokens of the largest step
            reduce_results: not followed; all ranks hold equal rows, and a sum over
                them would be wrong
            rest: what only upstream's layer needs

        Raises:
            PLEStoreError: the files are not as the config says
        """
        del reduce_results
        super().__init__(
            num_embeddings,
            embedding_dim,
            prefix=prefix,
            embedding_method=embedding_method,
            reduce_results=False,
            **rest,
        )
        stand_in = self.weight.data
        del self.weight
        stand_in.weight_loader = self._refuse_weights
        self.weight = stand_in

        config = get_current_vllm_config()
        text_config = config.model_config.hf_text_config
        shape = table_shape(text_config, num_embeddings, self.embedding_dim)
        self.counters = Counters()
        pinned = current_platform.is_cuda_alike() and is_pin_memory_available()
        store = open_store(config.engram_config, model_folder(config), layer_name(prefix), shape, self.counters, pinned)
        self.table = store
        self.fetcher = RowFetcher(store, self.counters)
        weakref.finalize(self, self.fetcher.close)
        table = store.table
        warn_of_contradiction(prefix, getattr(text_config, "ple_embedding_dtype", None), table)
        self.register_buffer(
            "rows",
            torch.zeros(max_total_tokens, num_ngram_heads, embedding_dim, dtype=stand_in.dtype),
            persistent=False,
        )
        logger.info(
            "The n-gram table of %s stays in %s: %d rows of %d values, %s, %.2f GiB.",
            prefix,
            store.paths[0] if len(store.paths) == 1 else f"{len(store.paths)} files of {store.paths[0].parent}",
            table.count,
            self.embedding_dim,
            table,
            table.count * table.row_bytes / 2**30,
        )

    def stage(self, ids: np.ndarray, padded_tokens: int) -> RowReadFailed | None:
        """Fetch the rows of a step.

        Args:
            ids: int64 ``[tokens, num_ngram_heads]``
            padded_tokens: tokens that the forward will look at; rows between
                ``tokens`` and this become zero, later ones stay as they are

        Returns:
            what could not be read, if anything: such rows are NaN, and all others right
        """
        tokens = ids.shape[0]
        fetched, lost = self._fetch(ids)
        if ids.size <= _FEW:
            self._place(fetched.records())
        else:
            rows = self._activations([self.table.split(part) for part in fetched.parts])
            index = self._send(torch.from_numpy(fetched.index.reshape(-1)))
            torch.index_select(rows, 0, index, out=self.rows[:tokens].flatten(0, 1))
        if padded_tokens > tokens:
            self.rows[tokens:padded_tokens].zero_()
        if lost is not None:
            unread = torch.from_numpy(np.isin(ids, lost.rows)).to(self.rows.device)
            self.rows[:tokens].masked_fill_(unread[:, :, None], float("nan"))
        return lost

    def _place(self, records: torch.Tensor) -> None:
        """Fill the first rows of the buffer with ``records``, uint8 ``[tokens, num_ngram_heads, row_bytes]``."""
        target, stored = self.rows[: len(records)], self.table.split(records)
        rows = stored[0]
        if self.table.table.kind is Kind.PLAIN and rows.dtype is target.dtype:
            # A step that decodes waits for this: one copy to the device, and no launch behind it.
            target.copy_(self._pinned(rows), non_blocking=True)
        else:
            target.copy_(self._activations([stored]))

    def _activations(self, stored: list[tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
        """Records that the store has split -> ``[..., dim]`` on the device, one part after the other."""
        # Codes travel to the device, and are multiplied there.
        rows, scales = (
            None if these[0] is None else self._joined([self._send(one) for one in these]) for these in zip(*stored)
        )
        return dequantize(self.table.table, rows, scales, self.rows.dtype)

    @staticmethod
    def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
        # fp8 has no cat everywhere, bytes have.
        return parts[0] if len(parts) == 1 else torch.cat([one.view(torch.uint8) for one in parts]).view(parts[0].dtype)

    def _fetch(self, ids: np.ndarray) -> tuple[Fetched, RowReadFailed | None]:
        """Records of ``ids``, and what could not be read of them; the records of such rows are other ones."""
        lost: RowReadFailed | None = None
        while True:
            try:
                return self.fetcher.fetch(ids), lost
            except RowReadFailed as error:
                lost = error if lost is None else lost.joined(error)
                readable = np.setdiff1d(ids, lost.rows)
                if not readable.size:
                    nothing = torch.zeros(1, self.table.table.row_bytes, dtype=torch.uint8, device="cpu")
                    return Fetched([nothing], np.zeros_like(ids)), lost
                ids = np.where(np.isin(ids, lost.rows), readable[0], ids)

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` on the device, without waiting for what the device does: pageable memory would."""
        return self._pinned(values).to(self.rows.device, non_blocking=True)

    def _pinned(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` where a GPU's copies begin without waiting: themselves, if they are there or there is no GPU."""
        return values if self.rows.device.type == "cpu" else values.pin_memory()

    def stage_zeros(self, padded_tokens: int) -> None:
        """Prepare a step without requests; no file is touched."""
        self.rows[:padded_tokens].zero_()

    def finalize_prefetch(self, total_tokens: int) -> torch.Tensor:
        """The staged rows, ``[total_tokens, num_ngram_heads * embedding_dim]``."""
        return self.rows[:total_tokens].flatten(-2)

    def start_prefetch(self, ngram_ids: torch.Tensor) -> None:
        """Nothing to start: rows are staged before the forward."""

    def forward(self, ngram_ids: torch.Tensor) -> NoReturn:
        raise RuntimeError("Rows of a table in files are staged, not looked up")

    def allocate_embedding_weight(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The shape and dtype of a weight, and no memory."""
        return torch.empty(num_embeddings, embedding_dim, dtype=dtype, device="meta")

    def _refuse_weights(self, *_: object, **__: object) -> NoReturn:
        """The weight loader: the loader's filter keeps the table's tensors away."""
        raise TableNotLoadable(self.table.paths[0], "no weights for the table", "some")


def open_store(
    engram: EngramConfig,
    folder: str,
    layer: str,
    shape: TableShape,
    counters: Counters | None = None,
    pinned: bool = False,
) -> RowStore:
    """The files that the settings ask for: one flat file, or the checkpoint's shards.

    Args:
        folder: the model directory
        layer: the checkpoint's name of the layer
        shape: what the config says of its table
        pinned: records are read into pinned memory

    Raises:
        PLEStoreError: the files are not as the config says
    """
    if engram.host_file_path:
        return open_flat(Path(engram.host_file_path), folder, layer, shape, counters=counters, pinned=pinned)
    return TableReader(locate_table(folder, layer, shape), counters=counters, pinned=pinned)


def choose_embedding(engram: EngramConfig | None) -> type[upstream.Qwen4ExpPLEEmbedding]:
    """The home of the table that the settings ask for."""
    if engram is None:
        return upstream.Qwen4ExpPLEDeviceEmbedding
    if engram.host_file_gather:
        return Qwen4ExpPLEFileEmbedding
    if engram.cpu_offload:
        return Qwen4ExpPLEExactPinnedEmbedding
    return upstream.Qwen4ExpPLEDeviceEmbedding
