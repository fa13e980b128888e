# SPDX-License-Identifier: Apache-2.0
"""Fetch a step's rows while the model's inputs are prepared."""

from typing import TYPE_CHECKING, Any

from torch import nn

from .embedding import Qwen4ExpPLEFileEmbedding

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
        for layer in self._layers:
            if dummy:
                layer.ngram_embedding.stage_zeros(padded_tokens)
                continue
            # Capacity beyond the step's requests and tokens would only cost time.
            ids = layer.compute_ngram_ids(
                batch.input_ids[: batch.num_tokens],
                model_inputs["query_start_loc"][: batch.num_reqs + 1],
                model_inputs["ngram_context"][: batch.num_reqs],
                output=layer._prefetch_ids[: batch.num_tokens],
            )
            layer.ngram_embedding.stage(ids, padded_tokens)
