# SPDX-License-Identifier: Apache-2.0
"""How a table in memory is stored and looked up, chosen by its headers.

Upstream chooses by the model-wide quantization method and by ``ple_embedding_dtype``,
which many checkpoints lack, so that an fp8 table in an NVFP4 or AWQ model does not load.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from ..common import ngram_embedding as upstream
from .errors import TableNotFound
from .formats import Kind, Table, locate_table
from .lookup import lookup_row_scaled
from .source import layer_name, model_folder, reads_safetensors, table_shape

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

logger = init_logger(__name__)

_DECLARED = {
    None: tuple(Kind),
    "bfloat16": (Kind.PLAIN,),
    "float8_e4m3fn": (Kind.SCALED, Kind.ROW_SCALED),
    "nvfp4": (Kind.NVFP4,),
}


class ScaledMethod(upstream.Qwen4ExpPLEFp8EmbeddingMethod):
    """fp8 rows with one scale, upstream's, multiplied in float32.

    Upstream rounds the scale to the activations' dtype first, which a bf16 scale survives
    and a float32 one does not: up to 0.4 % of every value.
    """

    def dequantize(self, layer: nn.Module, embeddings: torch.Tensor, output_dtype: torch.dtype) -> torch.Tensor:
        return (embeddings.float() * layer.weight_scale).to(output_dtype)


class RowScaledMethod(upstream.Qwen4ExpPLEEmbeddingMethod):
    """fp8 or int8 rows, each with a scale.  Lookups give activations, so nothing is left to dequantize."""

    def __init__(self, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
        """Remember what the headers say: ``dtype`` of the rows and of their scales."""
        self.dtype, self.scale_dtype = dtype, scale_dtype

    def create_weights(
        self, layer: upstream.Qwen4ExpPLEEmbedding, dim: int, rows_per_partition: list[int], *_: Any, **attrs: Any
    ) -> None:
        """Register ``weight`` ``[rows, dim]`` and ``weight_scale`` ``[rows, 1]`` in the table's kind of memory."""
        rows = sum(rows_per_partition)
        for name, width, dtype in (("weight", dim, self.dtype), ("weight_scale", 1, self.scale_dtype)):
            data = layer.allocate_embedding_weight(rows, width, dtype)
            parameter = ModelWeightParameter(
                data=data, input_dim=1, output_dim=0, weight_loader=attrs.get("weight_loader")
            )
            layer.register_parameter(name, parameter)
        if layer.weight_scale.is_pinned():
            self._uva_scale = get_accelerator_view_from_cpu_tensor(layer.weight_scale)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: rows stay as they are stored."""

    def lookup_dtype(self, layer: nn.Module) -> torch.dtype:
        return layer.params_dtype

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        rows, scales = F.embedding(input_, layer.weight), F.embedding(input_, layer.weight_scale)
        return (rows.float() * scales.float()).to(layer.params_dtype)

    def lookup_from_pinned(
        self, layer: upstream.Qwen4ExpPLEPinnedHostEmbedding, ids: torch.Tensor, output: torch.Tensor
    ) -> None:
        lookup_row_scaled(
            layer._uva_weight,
            self._uva_scale,
            ids,
            output,
            start=layer.shard_indices.org_vocab_start_index,
            end=layer.shard_indices.org_vocab_end_index,
        )

    def dequantize(self, layer: nn.Module, embeddings: torch.Tensor, output_dtype: torch.dtype) -> torch.Tensor:
        return embeddings.to(output_dtype)


def choose_method(
    quant_config: "QuantizationConfig | None", prefix: str, text_config: Any, rows: int, dim: int
) -> upstream.Qwen4ExpPLEEmbeddingMethod:
    """The storage of the table of layer ``prefix``.

    By the headers wherever the table is loaded from safetensors files; upstream's choice by
    the config where there are none: other formats, and dummy weights.

    Args:
        prefix: the layer's name in the model, ``….ngram_embedding``
        text_config: the model's
        rows: of the table, padding included
        dim: values per row

    Raises:
        PLEStoreError: the files' tables contradict themselves or the config
    """
    config = get_current_vllm_config()
    engram = config.engram_config
    if engram is not None and engram.host_file_gather:
        # The layer itself reads the headers, and gives out activations.
        return upstream.Qwen4ExpPLEUnquantizedEmbeddingMethod()
    declared = getattr(text_config, "ple_embedding_dtype", None)
    table = None
    if reads_safetensors(config):
        try:
            table = locate_table(model_folder(config), layer_name(prefix), table_shape(text_config, rows, dim))
        except TableNotFound:
            logger.info("%s: no safetensors headers to go by; its storage follows the config.", prefix)
    if table is None:
        return upstream.Qwen4ExpPLEEmbeddingMethod.from_quant_config(quant_config, prefix, declared)
    warn_of_contradiction(prefix, declared, table)
    if table.kind is Kind.SCALED:
        return ScaledMethod()
    if table.kind is Kind.ROW_SCALED:
        return RowScaledMethod(table.rows.dtype, table.row_scales.dtype)
    if table.kind is Kind.NVFP4:
        return upstream.Qwen4ExpPLENvFp4EmbeddingMethod()
    return upstream.Qwen4ExpPLEUnquantizedEmbeddingMethod()


def warn_of_contradiction(prefix: str, declared: str | None, table: Table) -> None:
    """Say so where the config declares another row format than the files have."""
    if table.kind not in _DECLARED.get(declared, ()):
        logger.warning(
            "config.json declares ple_embedding_dtype=%r, but the rows of %s are %s by their headers, and are read as such.",
            declared,
            prefix,
            table,
        )
