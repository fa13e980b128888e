# SPDX-License-Identifier: Apache-2.0
"""Into how many micro-batches decoding requests are spread: by a fixed rule, or by what rounds took.

A round is the time in which every decoding request gets a token.  With `batches` micro-batches of up to `size` requests
it lasts at least as long as one of them needs through all stages, and at least `batches` times as long as the slowest
stage needs for one, its host's work included.  Which of the two is longer depends on the card, the host, the partition
and the context, and so do the best number and the gain: two H200s whose hosts need 3.7 ms for a micro-batch want users
merged, six RTX 3090s with the same hosts want seven users in four (docs/ampere-multigpu/pipeline.md).

Only some numbers are worth timing: of those with the same largest micro-batch the smallest is never slower, since it is
the same way through the stages with fewer turns.  7 requests on 6 stages go into 4 (2+2+2+1) rather than 6 (2+1+1+1+1+1).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from vllm.logger import init_logger

logger = init_logger(__name__)

#: Rounds that are timed before an arrangement is judged, and those before them that still belong to the last one.
WINDOW, SETTLE = 12, 3
#: An arrangement that is slower by this part after HOPELESS rounds is left at once.
HOPELESS, SLOWER = 3, 0.25
#: Part of a round by which another arrangement must be faster: less is noise, and changing costs a round.
GAIN = 0.03
#: Windows of which the faster one counts.  Micro-batches that get in each other's way on two H200s did so for 30 to 60
#: rounds (12.9 ms instead of 9.6) and then went on undisturbed, without a change of anything.
REMEMBERED = 2
#: Rounds after which a slower arrangement is timed again; twice as many after each time that it lost.  It may have been
#: timed in such a stretch: with 512 for the first, two H200s kept 9.7 ms for 200 rounds where 8.1 ms could be had.
RETRY, MOST_DOUBLINGS = 128, 8


def arrangements(decoding: int, stages: int) -> list[int]:
    """Numbers of micro-batches worth considering for so many requests, the largest first; [1] for none or one."""
    fewest: dict[int, int] = {}
    for batches in range(min(stages, max(decoding, 1)), 0, -1):
        fewest[largest(decoding, batches)] = batches
    return list(fewest.values())


def largest(decoding: int, batches: int) -> int:
    """Requests in the largest micro-batch."""
    return -(-decoding // batches)


class FixedBatches:
    """As many micro-batches as have `min_batch` requests each."""

    def __init__(self, stages: int, min_batch: int) -> None:
        self.stages = stages
        self.min_batch = min_batch

    def choose(self, decoding: int) -> int:
        return max(1, min(self.stages, decoding // self.min_batch))

    def returned(self, decoded: int, quiet: bool) -> None:
        """Nothing is learned."""


@dataclass
class Timed:
    """What rounds of an arrangement took.

    Attributes:
        windows: the middle round of each of the last windows, in milliseconds.
        at: the round it was last timed in.
        losses: how often in a row another one was faster.
    """

    windows: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    at: int = 0
    losses: int = 0

    @property
    def ms(self) -> float:
        return min(self.windows)

    def due(self, now: int) -> bool:
        return now - self.at >= RETRY << min(self.losses, MOST_DOUBLINGS)


class MeasuredBatches:
    """Times rounds and keeps the arrangement with the shortest.

    Times are kept by (micro-batches, requests in the largest one), so that what 7 requests taught serves 8.  They age:
    contexts grow, and other programs come and go.  A trial lasts WINDOW + SETTLE rounds, or HOPELESS + SETTLE where it
    is clearly slower, and happens when the number of requests is new or RETRY rounds are over.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.times: dict[tuple[int, int], Timed] = {}
        #: Micro-batches of the last number of requests whose arrangements were all timed: where another one begins.
        self._kept = stages
        self._decoding = 0
        self._batches = 1
        self._now = 0
        self._restart()

    def choose(self, decoding: int) -> int:
        """Micro-batches for so many requests, at the moment."""
        if decoding != self._decoding:
            if len(self._rounds) >= HOPELESS:
                self._note()
            self._decoding = decoding
            self._batches = self._pick()
            self._restart()
        return self._batches

    def returned(self, decoded: int, quiet: bool) -> None:
        """A micro-batch came back with tokens of `decoded` requests that decode.

        Args:
            quiet: it had no tokens of a prompt.  Beside a prompt a round lasts as long as its chunks do, whatever the
                arrangement.
        """
        if not quiet or not self._decoding:
            self._restart()
            return
        self._tokens += decoded
        if self._tokens < self._decoding:
            return
        self._tokens -= self._decoding
        self._now += 1
        now = time.perf_counter()
        self._settling -= 1
        if self._settling < 0:
            self._rounds.append(1e3 * (now - self._began))
        self._began = now
        if len(self._rounds) >= WINDOW or self._hopeless():
            self._judge()

    def _restart(self) -> None:
        self._tokens = 0
        self._began = time.perf_counter()
        self._settling = SETTLE
        self._rounds: list[float] = []
        #: No window of it is over yet: one that has been kept is given whole windows to get over a stretch.
        self._fresh = True

    def _hopeless(self) -> bool:
        if not self._fresh or len(self._rounds) != HOPELESS:
            return False
        others = [timed.ms for batches, timed in self._known() if batches != self._batches]
        return bool(others) and median(self._rounds) > min(others) * (1 + SLOWER)

    def _note(self) -> None:
        timed = self.times.setdefault(self._key(self._batches), Timed())
        timed.windows.append(median(self._rounds))
        timed.at = self._now
        best = min(other.ms for _, other in self._known())
        timed.losses = timed.losses + 1 if timed.ms * (1 - GAIN) > best else 0
        self._rounds = []

    def _judge(self) -> None:
        self._note()
        self._fresh = False
        before, self._batches = self._batches, self._pick()
        if self._batches != before:
            self._restart()

    def _pick(self) -> int:
        """The fastest arrangement, or one that may be faster and has not been timed or not for long."""
        candidates = arrangements(self._decoding, self.stages)
        known = dict(self._known())
        if not known:
            return min(candidates, key=lambda batches: abs(batches - self._kept))
        fastest = min(known, key=lambda batches: known[batches].ms)
        if len(known) == len(candidates) > 1:
            self._kept = fastest
        for batches in candidates:
            if batches not in known or (batches != self._batches and known[batches].due(self._now)):
                return batches
        current = known.get(self._batches)
        if current is not None and known[fastest].ms > current.ms * (1 - GAIN):
            return self._batches
        if fastest != self._batches:
            shown = ", ".join(f"{batches} in {timed.ms:.1f} ms" for batches, timed in sorted(known.items()))
            logger.debug("%d decoding requests go into %d micro-batches: %s", self._decoding, fastest, shown)
        return fastest

    def _known(self) -> Iterator[tuple[int, Timed]]:
        for batches in arrangements(self._decoding, self.stages):
            if timed := self.times.get(self._key(batches)):
                yield batches, timed

    def _key(self, batches: int) -> tuple[int, int]:
        return batches, largest(self._decoding, batches)
