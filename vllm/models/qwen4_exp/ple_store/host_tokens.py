# SPDX-License-Identifier: Apache-2.0
"""A step's tokens on the host, and which of them the device has to be asked for.

An n-gram ends with the token that a step computes and begins with the ones before it.  Three sources, cheapest first:

    the prompt   every token of a request as it was added: its prompt, or after preemption also what it had generated
    received     sampled tokens that a pipeline stage gets from the last one, see ``received.py``
    the device   whatever else there is: sampled tokens where there is one stage, drafts, and what follows drafts

Only the last one waits for the device.  So a chunk of a prompt is hashed and read while the chunk before is computed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from .received import Copy, ReceivedTokens


class Device(Protocol):
    """What the device has of a step; every answer is a copy that is waited for."""

    def tokens(self) -> np.ndarray:
        """``[tokens]``, packed."""

    def starts(self) -> np.ndarray:
        """``[requests + 1]``, where each request's tokens begin."""

    def before(self) -> np.ndarray:
        """``[requests, reach]``, before each request's first token."""


@dataclass
class Step:
    """A step's tokens.

    Attributes:
        tokens: int64 ``[tokens]``, packed
        starts: int64 ``[requests + 1]``
        before: int64 ``[requests, reach]``, before each request's first token
        asked: whether the device was asked
    """

    tokens: np.ndarray
    starts: np.ndarray
    before: np.ndarray
    asked: bool = False


@dataclass
class Known:
    """What the host knows of one request: all tokens before ``prefill``, and the last ones before ``position``."""

    request: str
    prefill: np.ndarray
    position: int = -1
    last: np.ndarray | None = None


class HostTokens:
    """Follows the requests of a runner by their index in its states.

    Args:
        reach: tokens that n-grams look back
        eos: stands before the beginning of a request
        received: what comes from the last stage, if anything
    """

    def __init__(self, reach: int, eos: int, received: "ReceivedTokens | None" = None) -> None:
        self._reach, self._eos, self._received = reach, eos, received
        self._known: dict[int, Known] = {}

    def add(self, index: int, request: str, prefill: list[int]) -> None:
        """A request took a place in the states, or came back with more tokens.  ``prefill``: all it has so far."""
        self._known[index] = Known(request, np.asarray(prefill, dtype=np.int64))

    def step(self, batch: "InputBatch", device: Device) -> Step:
        """The tokens of a step."""
        if batch.query_start_loc_np[batch.num_reqs] != batch.num_tokens:
            # Drafts were dropped on the device after the host had cut the batch.
            return self._all_from_device(batch, device)
        indices = batch.idx_mapping_np[: batch.num_reqs].tolist()
        starts = np.asarray(batch.query_start_loc_np[: batch.num_reqs + 1], dtype=np.int64)
        computed = batch.num_computed_tokens_np[: batch.num_reqs].tolist()
        made = Step(
            np.empty(batch.num_tokens, dtype=np.int64), starts, np.empty((batch.num_reqs, self._reach), dtype=np.int64)
        )
        unknown = []
        for row, (index, position) in enumerate(zip(indices, computed, strict=True)):
            # Taken in any case: one that is not used now must not be taken for the next.
            newest = self._received.take(index) if self._received is not None else None
            known = self._known.get(index)
            if known is not None and known.request != batch.req_ids[row]:
                known = None
            end = position + int(starts[row + 1] - starts[row])
            if known is not None and end <= len(known.prefill):
                self._from_prefill(made, row, known, position, end)
            elif known is not None and newest is not None and self._goes_on(known, newest[0], position, end):
                self._from_received(made, row, known, int(newest[0].wait()[newest[1], 0]))
            else:
                unknown.append(row)
        if unknown:
            self._from_device(made, unknown, batch, device, [self._known.get(index) for index in indices])
        return made

    def following(self, batch: "InputBatch", most: int) -> Step | None:
        """Prompt tokens behind those of a step, as many of each request as it has in the step and ``most`` in all.

        What the next step will probably compute; None where no prompt goes on.
        """
        tokens, starts, before = [], [0], []
        for row, index in enumerate(batch.idx_mapping_np[: batch.num_reqs].tolist()):
            known = self._known.get(index)
            if known is None or known.request != batch.req_ids[row]:
                continue
            count = int(batch.query_start_loc_np[row + 1] - batch.query_start_loc_np[row])
            end = int(batch.num_computed_tokens_np[row]) + count
            ahead = min(len(known.prefill) - end, count, most - starts[-1])
            if ahead > 0:
                tokens.append(known.prefill[end : end + ahead])
                starts.append(starts[-1] + ahead)
                before.append(self._prefix(known.prefill, end))
        if not tokens:
            return None
        return Step(np.concatenate(tokens), np.array(starts, dtype=np.int64), np.stack(before))

    def _all_from_device(self, batch: "InputBatch", device: Device) -> Step:
        for index in batch.idx_mapping_np[: batch.num_reqs].tolist():
            if self._received is not None:
                self._received.take(index)
            if index in self._known:
                self._known[index].position = -1
        answers = device.tokens(), device.starts(), device.before()
        return Step(*(one.astype(np.int64) for one in answers), asked=True)

    @staticmethod
    def _goes_on(known: Known, copy: "Copy", position: int, end: int) -> bool:
        """Whether a step computes one token of a request, namely the one that was sampled last, which is in ``copy``.

        With drafts several tokens come from the last stage, of which the device knows how many count.
        """
        return end == position + 1 == known.position + 1 and copy.tokens.shape[1] == 1

    def _from_prefill(self, made: Step, row: int, known: Known, position: int, end: int) -> None:
        made.tokens[made.starts[row] : made.starts[row + 1]] = known.prefill[position:end]
        made.before[row] = self._prefix(known.prefill, position)
        known.position, known.last = end, self._prefix(known.prefill, end)

    def _from_received(self, made: Step, row: int, known: Known, token: int) -> None:
        made.tokens[made.starts[row]] = token
        made.before[row] = known.last
        known.position += 1
        known.last = np.append(known.last[1:], token)

    def _from_device(
        self, made: Step, rows: list[int], batch: "InputBatch", device: Device, known: list[Known | None]
    ) -> None:
        tokens, before = device.tokens(), None
        made.asked = True
        for row in rows:
            span = slice(made.starts[row], made.starts[row + 1])
            one = known[row]
            if one is not None and one.request != batch.req_ids[row]:
                one = None
            if one is not None and one.position == batch.num_computed_tokens_np[row]:
                # Its last tokens are here: while a request decodes, the new one is all that is asked for.
                last = one.last
            else:
                before = device.before() if before is None else before
                last = before[row]
            made.tokens[span], made.before[row] = tokens[span], last
            if one is None:
                continue
            if batch.num_draft_tokens:
                # Some of them may be refused: where the request stands is known to the device alone from now on.
                one.position = -1
            else:
                one.position = int(batch.num_computed_tokens_np[row]) + span.stop - span.start
                one.last = np.append(last, tokens[span])[-self._reach :].astype(np.int64)

    def _prefix(self, tokens: np.ndarray, end: int) -> np.ndarray:
        """The ``reach`` tokens before ``end``."""
        made = np.full(self._reach, self._eos, dtype=np.int64)
        have = min(end, self._reach)
        if have:
            made[-have:] = tokens[end - have : end]
        return made
