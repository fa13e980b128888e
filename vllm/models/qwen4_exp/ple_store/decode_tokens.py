"""The n-grams of decoding requests, from tokens that the host has.

A request's n-gram ends with the token that its step computes and begins with the ones before it.  Those are kept here
from step to step; the last one was sampled, and comes from ``received.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from .received import Copy, ReceivedTokens


@dataclass
class Past:
    """Tokens of a request before position ``position``: the last ``ngram_size - 1`` of them."""

    request: str
    position: int
    tokens: list[int]


class DecodeTokens:
    """What the host knows of each request, by its index in the runner's states."""

    def __init__(self, received: ReceivedTokens) -> None:
        self._received = received
        self._pasts: dict[int, Past] = {}

    def known(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tokens of a step, and those before each, without asking the device.

        Returns:
            int64 ``[requests]`` and ``[requests, ngram_size - 1]``; None where a request has more than one token in
            this step or its past is not known, as after its prompt
        """
        indices = batch.idx_mapping_np[: batch.num_reqs].tolist()
        newest = [self._received.take(index) for index in indices]
        if batch.num_tokens != batch.num_reqs or batch.num_draft_tokens:
            return None
        pasts = [self._past(batch, row, index) for row, index in enumerate(indices)]
        if None in pasts or None in newest:
            return None
        tokens = [self._token(*copy) for copy in newest]
        before = torch.tensor([past.tokens for past in pasts])
        for past, token in zip(pasts, tokens):
            past.position += 1
            past.tokens = [*past.tokens[1:], token]
        return torch.tensor(tokens), before

    def note(self, batch: InputBatch, tokens: torch.Tensor, before: torch.Tensor) -> None:
        """Remember a step whose tokens came from the device.

        Args:
            tokens: ``[tokens]`` of the step, packed, on the CPU
            before: ``[requests, ngram_size - 1]`` before each request's first one, on the CPU
        """
        starts = batch.query_start_loc_np
        for row, index in enumerate(batch.idx_mapping_np[: batch.num_reqs].tolist()):
            begin, end = int(starts[row]), int(starts[row + 1])
            past = [*before[row].tolist(), *tokens[max(begin, end - before.shape[1]) : end].tolist()]
            position = int(batch.num_computed_tokens_np[row]) + end - begin
            self._pasts[index] = Past(batch.req_ids[row], position, past[-before.shape[1] :])

    def _past(self, batch: InputBatch, row: int, index: int) -> Past | None:
        past = self._pasts.get(index)
        if past is None or past.request != batch.req_ids[row]:
            return None
        return past if past.position == batch.num_computed_tokens_np[row] else None

    @staticmethod
    def _token(copy: Copy, row: int) -> int:
        return int(copy.wait()[row, 0])
