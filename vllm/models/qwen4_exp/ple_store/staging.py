# SPDX-License-Identifier: Apache-2.0
"""Fetch a step's rows while the model's inputs are prepared."""

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

import vllm.envs as envs
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics import ngram_table

from .counters import Counters
from .embedding import Qwen4ExpPLEFileEmbedding
from .errors import LostRow, RowReadFailed
from .host_tokens import HostTokens, Step
from .ngram_ids import NgramHash
from .received import received_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


#: Requests of vllm/v1/worker/gpu/warmup.py. That none is missing shows in tests/e2e/test_server.py.
_WARM_UP = re.compile(r"_[a-z0-9_]*warmup_(\d+|decode|prefill)_")


#: Sentences that are kept for the scheduler, which asks for one within a few steps.
_REASONS = 256

logger = init_logger(__name__)


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
        self._reasons: dict[str, str] = {}
        if state is not None:
            self._watch(state)
            publish([layer.ngram_embedding.counters for layer in self._layers], self._reasons, state.vllm_config)

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
            RowReadFailed: rows could not be read, and the requests that needed them cannot be ended by themselves
        """
        if not self._layers:
            return
        padded_tokens = batch.num_tokens_after_padding
        if made_up(batch, req_states):
            for layer in self._layers:
                layer.ngram_embedding.stage_zeros(padded_tokens)
            return
        step = self._step(batch, model_inputs)
        for layer, hash_ in zip(self._layers, self._hashes, strict=True):
            ids = hash_(step.tokens, step.starts, step.before)
            lost = layer.ngram_embedding.stage(ids, padded_tokens)
            if lost is not None:
                layer.ngram_embedding.counters.add(failures=1)
                self._give_up(lost.named(_requests(batch, ids, lost.lost)))
        following = self._tokens.following(batch, self._most)
        if following is not None:
            for layer, hash_ in zip(self._layers, self._hashes, strict=True):
                ids = partial(hash_, following.tokens, following.starts, following.before)
                layer.ngram_embedding.fetcher.read_ahead(ids)

    def _give_up(self, lost: RowReadFailed) -> None:
        """End the requests that needed lost rows, or this stage.

        Their rows are NaN, which stays in a request's states; so its logits are NaN, for which the scheduler ends it
        (``v1/core/sched/damaged_requests.py``) with the sentence that is kept here.

        Raises:
            RowReadFailed: nobody looks for NaN, or the file is lost and every request would end like this
        """
        if lost.gone or not envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            raise lost
        logger.error("%s The server goes on; these requests end with an error.", lost)
        # Each hears of a row of its own; what others needed is not theirs to know.
        for request, row in lost.requests.items():
            self._reasons[request] = str(row)
        while len(self._reasons) > _REASONS:
            del self._reasons[next(iter(self._reasons))]

    def _step(self, batch: "InputBatch", model_inputs: dict[str, Any]) -> Step:
        begun = time.perf_counter()
        step = self._tokens.step(batch, _OnDevice(batch, model_inputs))
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


class _OnDevice:
    """``host_tokens.Device`` of a step. Capacity beyond its requests and tokens would only cost time."""

    def __init__(self, batch: "InputBatch", model_inputs: dict[str, Any]) -> None:
        self._batch, self._inputs = batch, model_inputs

    def tokens(self) -> np.ndarray:
        return self._batch.input_ids[: self._batch.num_tokens].cpu().numpy()

    def starts(self) -> np.ndarray:
        return self._inputs["query_start_loc"][: self._batch.num_reqs + 1].cpu().numpy()

    def before(self) -> np.ndarray:
        return self._inputs["ngram_context"][: self._batch.num_reqs].cpu().numpy()


def made_up(batch: "InputBatch", req_states: "RequestState") -> bool:
    """Whether no client is behind a step: profiling, warm-up, capture of graphs, idle data-parallel ranks.

    Their rows do not matter, and reading them would tie start-up to the disk.  Most run without requests in the states.
    The warm-up of kernels adds some; a client's have a random end, which keeps them apart from these names.
    """
    first = batch.req_ids[0]
    return first not in req_states.req_id_to_index or _WARM_UP.fullmatch(first) is not None


def publish(counters: list[Counters], reasons: dict[str, str], vllm_config: "VllmConfig") -> None:
    """Let what reading has cost on this worker be seen on ``/metrics``, and by the scheduler why requests end."""
    labels = {
        "engine": str(vllm_config.parallel_config.data_parallel_index),
        "stage": str(get_pp_group().rank_in_group),
        "rank": str(get_tp_group().rank_in_group),
    }

    def snapshot() -> dict[str, float]:
        parts = [one.snapshot() for one in counters]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    ngram_table.answer(labels, snapshot, lambda: dict(reasons))


def _requests(batch: "InputBatch", ids: np.ndarray, lost: list[LostRow]) -> dict[str, LostRow]:
    """The requests of a step that need lost rows, each with the first that it needs; ``ids`` as hashed for the step."""
    by_number = {one.row: one for one in lost}
    touched, starts = np.isin(ids, list(by_number)), batch.query_start_loc_np
    found: dict[str, LostRow] = {}
    for index, name in enumerate(batch.req_ids[: batch.num_reqs]):
        own = slice(starts[index], starts[index + 1])
        if touched[own].any():
            found[name] = by_number[int(ids[own][touched[own]][0])]
    return found
