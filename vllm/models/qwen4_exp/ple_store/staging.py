# SPDX-License-Identifier: Apache-2.0
"""Fetch a step's rows while the model's inputs are prepared."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from .embedding import Qwen4ExpPLEFileEmbedding
from .errors import RowReadFailed
from .host_tokens import HostTokens, Step
from .ngram_ids import NgramHash
from .received import received_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class PLERowStager:
    """Stages rows for those layers of a model whose table is in files.

    On a pipeline stage without such a layer, and with a table in memory, there are
    none and ``stage`` does nothing.
    """

    def __init__(self, model: nn.Module, state: Any = None) -> None:
        """``state``: the model's state in the runner, which is told of every request."""
        self._layers = [
            module
            for module in model.modules()
            if isinstance(getattr(module, "ngram_embedding", None), Qwen4ExpPLEFileEmbedding)
        ]
        if not self._layers:
            return
        received = received_tokens()
        if received is not None:
            received.wanted = True
        # All layers hash the same tokens, each with numbers of its own.
        self._hashes = [NgramHash.of(layer) for layer in self._layers]
        self._tokens = HostTokens(self._hashes[0].reach, self._hashes[0].eos, received)
        self._most = self._layers[0].ngram_embedding.rows.shape[0]
        if state is not None:
            self._watch(state)

    def stage(
        self,
        batch: "InputBatch",
        req_states: "RequestState",
        model_inputs: dict[str, Any],
    ) -> None:
        """Fill every layer's buffer for one forward.

        Token ``t`` of the packed batch gets row ``t`` of the buffer: requests one
        after the other, each with the tokens of this step only.

        Args:
            batch: the step; its ``input_ids`` are final, sampled tokens included
            req_states: the requests that the runner holds
            model_inputs: with ``query_start_loc`` ``[max_num_reqs + 1]`` and
                ``ngram_context`` ``[max_num_reqs, ngram_size - 1]``

        Raises:
            RowOutOfRange, RowReadFailed: with the requests that needed the rows
        """
        if not self._layers:
            return
        padded_tokens = batch.num_tokens_after_padding
        # Profiling, warm-up of graphs and idle data-parallel ranks run batches of made-up
        # requests. Their rows do not matter, and reading them would tie start-up to the
        # disk.
        if batch.req_ids[0] not in req_states.req_id_to_index:
            for layer in self._layers:
                layer.ngram_embedding.stage_zeros(padded_tokens)
            return
        step = self._step(batch, model_inputs)
        for layer, hash_ in zip(self._layers, self._hashes, strict=True):
            ids = hash_(step.tokens, step.starts, step.before)
            try:
                layer.ngram_embedding.stage(ids, padded_tokens)
            except RowReadFailed as error:
                layer.ngram_embedding.counters.add(failures=1)
                raise error.named(_requests(batch, ids, error.rows)) from error
        following = self._tokens.following(batch, self._most)
        if following is not None:
            for layer, hash_ in zip(self._layers, self._hashes, strict=True):
                layer.ngram_embedding.fetcher.read_ahead(hash_(following.tokens, following.starts, following.before))

    def _step(self, batch: "InputBatch", model_inputs: dict[str, Any]) -> Step:
        begun = time.perf_counter()

        def ask() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            # Capacity beyond the step's requests and tokens would only cost time.
            tokens = batch.input_ids[: batch.num_tokens]
            starts = model_inputs["query_start_loc"][: batch.num_reqs + 1]
            before = model_inputs["ngram_context"][: batch.num_reqs]
            return tokens.cpu().numpy(), starts.cpu().numpy(), before.cpu().numpy()

        step = self._tokens.step(batch, ask)
        seconds = time.perf_counter() - begun
        for layer in self._layers:
            layer.ngram_embedding.counters.add(token_wait_seconds=seconds)
        return step

    def _watch(self, state: Any) -> None:
        """Hear of requests as ``state`` does; it is complete but for what its class adds."""
        add = state.add_request

        def add_request(index: int, request: "NewRequestData") -> None:
            add(index, request)
            self._tokens.add(index, request.req_id, request.prefill_token_ids)

        state.add_request = add_request


def _requests(batch: "InputBatch", ids: np.ndarray, rows: list[int]) -> list[str]:
    """The requests of a step that need any of ``rows``; ``ids`` as hashed for it."""
    touched = np.isin(ids, rows).any(axis=1)
    starts = batch.query_start_loc_np
    return [
        name for row, name in enumerate(batch.req_ids[: batch.num_reqs]) if touched[starts[row] : starts[row + 1]].any()
    ]
