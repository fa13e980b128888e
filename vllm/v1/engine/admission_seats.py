# SPDX-License-Identifier: Apache-2.0
"""The engine client of the API server: a request that is let in keeps its seat until the engine has it.

Upstream asks `check_admission` twice: before a response is started, and when the request is handed to the engine, which
for a streamed answer is after its status line.  Nothing counts a request in between.  A burst passes the first question
as a whole, and what exceeds the limit is refused by the second, inside a response that says 200.

Here the last question before the response is the one that counts.  It is asked in `generate`, which every handler calls
before it answers, and whoever passes holds a seat that further requests see.  The seat is given back when the request is
registered, in the same moment, or when the handler drops the stream without having begun it.  The Responses API calls
`generate` late, from a generator that may take several turns; `let_in` seats its first turn early.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import extract_prompt_len
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(eq=False)
class Seat:
    """A request's place in the limits, in sequences and in tokens of its prompt."""

    request_id: str
    requests: int
    tokens: int
    #: Taken for a stream that has yet to call `generate`.
    early: bool = False
    held: bool = True


class Seats:
    """Requests that were let in and are not registered with the engine yet."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        #: Seats whose stream has not begun. A client may choose one name for two requests.
        self._unclaimed: defaultdict[str, list[Seat]] = defaultdict(list)

    def take(self, seat: Seat) -> None:
        self._unclaimed[seat.request_id].append(seat)
        self.requests += seat.requests
        self.tokens += seat.tokens

    def meet(self, request_id: str) -> bool:
        """Whether a seat was taken early for the request that `generate` is called for now."""
        for seat in self._unclaimed.get(request_id, ()):
            if seat.early:
                seat.early = False
                return True
        return False

    def claim(self, request_id: str) -> Seat | None:
        """The seat of a request whose stream begins; None if it needed none."""
        seats = self._unclaimed.get(request_id)
        if not seats:
            return None
        seat = seats.pop(0)
        if not seats:
            del self._unclaimed[request_id]
        return seat

    def give_back(self, seat: Seat) -> bool:
        """Whether it was still held."""
        if not seat.held:
            return False
        seat.held = False
        unclaimed = self._unclaimed.get(seat.request_id, [])
        if seat in unclaimed:
            unclaimed.remove(seat)
            if not unclaimed:
                del self._unclaimed[seat.request_id]
        self.requests -= seat.requests
        self.tokens -= seat.tokens
        return True


#: The seat of the request that is being registered, in the task that does so.
_own: ContextVar[Seat | None] = ContextVar("seat", default=None)


class SeatedLLM(AsyncLLM):
    """AsyncLLM whose limits (`max_num_queued_reqs`, `max_num_queued_tokens`) refuse before a response begins.

    With several API servers each counts its own seats and the registered requests of all.  Two of them may let the last
    request in at once, which then exceeds the limit by one rather than being refused late.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seats = Seats()
        super().__init__(*args, **kwargs)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Upstream's stream of outputs, let in before it is begun.

        Raises:
            GracefulHTTPError: the request would exceed a limit.
        """
        stream = super().generate(prompt, sampling_params, request_id, **kwargs)
        if not self.seats.meet(request_id):
            self.let_in(stream, prompt, sampling_params, request_id)
        return stream

    def let_in(
        self, stream: Any, prompt: Any, sampling_params: SamplingParams, request_id: str, early: bool = False
    ) -> None:
        """Ask the limits, and take a seat for as long as the request is not registered and there is the stream.

        Raises:
            GracefulHTTPError: the request would exceed a limit.
        """
        config = self.scheduler_config
        if config.max_num_queued_reqs is None and config.max_num_queued_tokens is None:
            return
        self.check_admission(sampling_params.n, request_id)
        seat = Seat(request_id, sampling_params.n, sampling_params.n * self._prompt_tokens(prompt), early)
        self.seats.take(seat)
        # A generator that is dropped before its first step runs none of its own clean-up.
        weakref.finalize(stream, self.seats.give_back, seat).atexit = False

    async def add_request(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        seat = self.seats.claim(request_id)
        token = _own.set(seat)
        try:
            return await super().add_request(request_id, *args, **kwargs)
        finally:
            _own.reset(token)
            if seat is not None:
                self.seats.give_back(seat)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        seat = _own.get()
        if seat is not None and self.seats.give_back(seat):
            # Let in before; the caller registers it before anyone else runs.
            return
        super().check_admission(n + self.seats.requests, request_id)

    def get_num_queued_tokens(self) -> int:
        return super().get_num_queued_tokens() + self.seats.tokens

    def _prompt_tokens(self, prompt: Any) -> int:
        """Tokens of a prompt that a handler has prepared; 0 for one that is prepared later, by the engine client."""
        if isinstance(prompt, dict) and "type" in prompt:
            return extract_prompt_len(self.model_config, prompt)
        return 0


def let_in(client: Any, prompt: Any, sampling_params: SamplingParams, request_id: str, stream: Any) -> Any:
    """The stream, whose first call of `generate` has its seat from now on.

    Args:
        client: of the engine; any but ours has no seats
        prompt, sampling_params, request_id: what the stream will give to `generate`

    Raises:
        GracefulHTTPError: the request would exceed a limit.
    """
    if isinstance(client, SeatedLLM):
        client.let_in(stream, prompt, sampling_params, request_id, early=True)
    return stream
