# SPDX-License-Identifier: Apache-2.0
"""The n-gram embedding layer without a weight.

Rows come in two steps.  Before the forward ``stage`` reads them from the files into
``rows``, a buffer that never moves; during the forward ``finalize_prefetch`` gives out
a view of it.  Nothing in between touches a file or waits for the host, so the forward
can be captured in a CUDA graph.
"""

import os
import re
from typing import Any, ClassVar, NoReturn

import torch

from vllm.config import EngramConfig, VllmConfig, get_current_vllm_config
from vllm.logger import init_logger

from ..common import ngram_embedding as upstream
from .errors import HostFileGatherRefused, TableNotLoadable
from .gather import TableFiles
from .locate import TableLocation, TableShape, locate_table

logger = init_logger(__name__)

# Upstream casts a table to the model's dtype while loading; here the cast is the copy
# into the staging buffer.
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Qwen4ExpPLEFileEmbedding(upstream.Qwen4ExpPLEEmbedding):
    """A table whose rows are read from the checkpoint's files.

    Every rank of a tensor-parallel group reads all rows that it needs: 5 KiB per token
    and rank, against an all-reduce of the same size.

    Attributes:
        rows: ``[max_total_tokens, num_ngram_heads, embedding_dim]`` on the device, in
            the layer's storage dtype; the rows of the step at hand
        weight: a ``meta`` tensor of the rank's part of the table, for those who ask
            for its shape or dtype.  It is no parameter: nothing loads, moves, counts
            or saves it.
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
            HostFileGatherRefused: the rows are NVFP4
            PLEStoreError: the files are not as the config says
        """
        if isinstance(embedding_method, upstream.Qwen4ExpPLENvFp4EmbeddingMethod):
            raise HostFileGatherRefused(
                "quantization",
                "NVFP4",
                f"for {prefix} splits a row over two tensors, which host_file_gather cannot read yet.",
                "Set host_file_gather=False, or use a bf16 or fp8 table.",
            )
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

        self.table = TableFiles(self._locate(get_current_vllm_config(), prefix, num_embeddings))
        self.register_buffer(
            "rows",
            torch.zeros(max_total_tokens, num_ngram_heads, embedding_dim, dtype=stand_in.dtype),
            persistent=False,
        )
        location = self.table.location
        logger.info(
            "The n-gram table of %s stays in %d file(s): %d rows of %d %s, %.2f GiB.",
            prefix,
            len({shard.path for shard in location.shards}),
            location.rows,
            location.dim,
            location.dtype,
            location.rows * location.row_bytes / 2**30,
        )

    def stage(self, ids: torch.Tensor, padded_tokens: int) -> None:
        """Fetch the rows of a step.

        Args:
            ids: int64 ``[tokens, num_ngram_heads]`` on the device
            padded_tokens: tokens that the forward will look at; rows between
                ``tokens`` and this become zero, later ones stay as they are

        Raises:
            RowOutOfRange, RowReadFailed
        """
        tokens = ids.shape[0]
        self.rows[:tokens].copy_(self.table.gather(ids.cpu()))
        self.rows[tokens:padded_tokens].zero_()

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

    def _locate(self, vllm_config: VllmConfig, prefix: str, num_embeddings: int) -> TableLocation:
        """Find the table of layer ``prefix`` in the model's directory."""
        fp8 = isinstance(self.embedding_method, upstream.Qwen4ExpPLEFp8EmbeddingMethod)
        config = vllm_config.model_config.hf_text_config
        shape = TableShape(
            rows=num_embeddings,
            dim=self.embedding_dim,
            parts=int(getattr(config, "split_ngram_parts", 512)),
            dtypes=(torch.float8_e4m3fn,) if fp8 else _PLAIN_DTYPES,
        )
        # "language_model.model.layers.1.ple…" here, "model.language_model.layers.1.ple…"
        # in the file.
        layer = re.search(r"layers\.\d+\..+$", prefix)
        return locate_table(model_folder(vllm_config), layer[0] if layer else prefix, shape)

    def _refuse_weights(self, *_: object, **__: object) -> NoReturn:
        """The weight loader: the loader's filter keeps the table's tensors away."""
        raise TableNotLoadable(self.table.location.shards[0].path, "no weights for the table", "some")


def choose_embedding(engram: EngramConfig | None) -> type[upstream.Qwen4ExpPLEEmbedding]:
    """The home of the table that the settings ask for."""
    if engram is None:
        return upstream.Qwen4ExpPLEDeviceEmbedding
    if engram.host_file_gather:
        return Qwen4ExpPLEFileEmbedding
    if engram.cpu_offload:
        return upstream.Qwen4ExpPLEPinnedHostEmbedding
    return upstream.Qwen4ExpPLEDeviceEmbedding


def model_folder(vllm_config: VllmConfig) -> str:
    """The directory with the model's safetensors files.

    A hub id is fetched by the loader's own rules, with its revision, cache directory
    and ignore patterns; fetching again later costs the loader nothing.
    """
    model = vllm_config.model_config.model
    if os.path.isdir(model) or vllm_config.load_config.load_format == "dummy":
        return model
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(vllm_config.load_config)
    folder, *_ = loader._prepare_weights(
        model,
        subfolder=None,
        revision=vllm_config.model_config.revision,
        fall_back_to_pt=False,
        allow_patterns_overrides=None,
    )
    return folder
