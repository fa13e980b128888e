# SPDX-License-Identifier: Apache-2.0
"""How many decoding requests the next micro-batch of a pipeline takes.

A request that decodes is in one micro-batch at a time: its next token needs the last one.  With P stages, P
micro-batches are on their way, and a stage computes on one of them.  Taking every request that could go, as upstream
does, keeps together those whose prompts ended together: all users sit in one micro-batch, and P-1 stages wait.

Here a micro-batch takes its part of all decoding requests and leaves the others to the next ones; how many parts there
are is decided in decode_batches.py.  What is left waits for P-1 micro-batches at most; from then on, as many come back
as may go, and nobody waits until a request comes or goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

from vllm.v1.core.sched.decode_batches import FixedBatches, MeasuredBatches


def quota(decoding: int, in_flight: Sequence[int], batches: int) -> int:
    """Decoding requests that the next micro-batch may take.

    Args:
        decoding: requests that decode, on their way or not
        in_flight: of these, those in each of the last micro-batches, which are still on their way
        batches: micro-batches that decoding requests are spread over

    It is 0 while as many micro-batches are in use as shall be.  Otherwise it is at least 1 if there is a request.
    """
    if sum(number > 0 for number in in_flight) >= batches:
        return 0
    smaller, larger = divmod(decoding, batches)
    return smaller + (sum(number > smaller for number in in_flight) < larger)


class DecodeSpread:
    """Remembers which requests the micro-batches on their way will return a token for."""

    def __init__(self, stages: int, batches: FixedBatches | MeasuredBatches) -> None:
        self.stages = stages
        self.batches = batches
        self._in_flight: deque[tuple[str, ...]] = deque(maxlen=stages - 1)
        self._micro_batch = 0
        #: Request id to the number of the micro-batch it last decoded in.
        self._last: dict[str, int] = {}

    def quota(self, decoding: Container[str], number: int) -> int:
        """See the function above; `number` is the size of `decoding`, ids of every request that decodes."""
        # Requests that ended since do not count: their place in a micro-batch is free when it comes round.
        in_flight = [sum(request_id in decoding for request_id in batch) for batch in self._in_flight]
        return quota(number, in_flight, self.batches.choose(number))

    def last(self, request_id: str) -> int:
        """Number of the micro-batch in which the request last decoded; -1 before the first."""
        return self._last.get(request_id, -1)

    def sent(self, sampled: Sequence[str]) -> None:
        """A micro-batch went out, empty ones too, that will return a token for each request of `sampled`."""
        self._in_flight.append(tuple(sampled))
        self._micro_batch += 1
        self._last.update(dict.fromkeys(sampled, self._micro_batch))

    def forget(self, request_ids: Sequence[str]) -> None:
        """The requests ended."""
        for request_id in request_ids:
            self._last.pop(request_id, None)
