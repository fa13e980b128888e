# SPDX-License-Identifier: Apache-2.0
"""Fetch a step's rows while the model's inputs are prepared."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .decode_tokens import DecodeTokens
from .embedding import Qwen4ExpPLEFileEmbedding
from .received import received_tokens

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class PLERowStager:
    """Stages rows for those layers of a model whose table is in files.

    On a pipeline stage without such a layer, and with a table in memory, there are
    none and ``stage`` does nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            module
            for module in model.modules()
            if isinstance(getattr(module, "ngram_embedding", None), Qwen4ExpPLEFileEmbedding)
        ]
        received = received_tokens()
        self._decode_tokens = None
        if self._layers and received is not None:
            received.wanted = True
            self._decode_tokens = DecodeTokens(received)
            self._on_host = [_on_host(layer) for layer in self._layers]

    def stage(
        self,
        batch: "InputBatch",
        req_states: "RequestState",
        model_inputs: dict[str, Any],
    ) -> None:
        """Fill every layer's buffer for one forward.

        Token ``t`` of the packed batch gets row ``t`` of the buffer: requests one
        after the other, each with the tokens of this step only.  The predecessors of a
        chunk's first tokens come from ``ngram_context``.

        Args:
            batch: the step; its ``input_ids`` are final, sampled tokens included
            req_states: the requests that the runner holds
            model_inputs: with ``query_start_loc`` ``[max_num_reqs + 1]`` and
                ``ngram_context`` ``[max_num_reqs, ngram_size - 1]``

        Raises:
            RowOutOfRange, RowReadFailed
        """
        padded_tokens = batch.num_tokens_after_padding
        # Profiling, warm-up of graphs and idle data-parallel ranks run batches of made-up
        # requests. Their rows do not matter, and reading them would tie start-up to the
        # disk.
        dummy = batch.req_ids[0] not in req_states.req_id_to_index
        if dummy:
            for layer in self._layers:
                layer.ngram_embedding.stage_zeros(padded_tokens)
            return
        known = self._decode_tokens.known(batch) if self._decode_tokens is not None else None
        if known is not None:
            tokens, before = known
            starts = torch.arange(batch.num_reqs + 1)
            for layer, twin in zip(self._layers, self._on_host):
                layer.ngram_embedding.stage(twin.compute_ngram_ids(tokens, starts, before), padded_tokens)
            return
        # Capacity beyond the step's requests and tokens would only cost time.
        input_ids = batch.input_ids[: batch.num_tokens]
        context = model_inputs["ngram_context"][: batch.num_reqs]
        for layer in self._layers:
            ids = layer.compute_ngram_ids(
                input_ids,
                model_inputs["query_start_loc"][: batch.num_reqs + 1],
                context,
                output=layer._prefetch_ids[: batch.num_tokens],
            )
            layer.ngram_embedding.stage(ids, padded_tokens)
        if self._decode_tokens is not None:
            self._decode_tokens.note(batch, input_ids.cpu(), context.cpu())


def _on_host(layer: nn.Module) -> nn.Module:
    """A layer that hashes on the CPU as ``layer`` does: the same attributes, buffers copied."""
    twin = copy.copy(layer)
    twin._buffers = {name: buffer.cpu() for name, buffer in layer._buffers.items() if buffer is not None}
    return twin
