"""Users who ask together, and what each rule gives them while all of them decode."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median

from benchmarks import host_time

from .switch import RULES, Rule

#: Tokens of each user before a turn counts, and those that it counts.  A measuring rule first tries what it may choose.
SETTLE, COUNTED = 16, 96
LEARN = 96


@dataclass
class Stream:
    """One user's request: when each of its tokens came, in seconds."""

    stamps: list[float] = field(default_factory=list)


class Users:
    """Requests that are decoding; `step` until a condition holds."""

    def __init__(self, engine, words: int = 474) -> None:
        """`words`: of how many different tokens prompts are made.

        With four, all n-grams of a prompt are 80, whose rows are read once: where K/V is compared, so that nothing waits
        for the n-gram table.  (474 at 16 layers: an H200 reads a prompt at 12,500 tokens/s, and waits for rows.)
        """
        self.engine = engine
        self.words = words
        self.streams: dict[str, Stream] = {}
        self._asked = 0

    def ask(self, users: int, context: int, tokens: int) -> None:
        """So many users send prompts of `context` random tokens, and each gets `tokens` at most."""
        from vllm import SamplingParams

        for _ in range(users):
            dice = random.Random(self._asked)
            name = f"user-{self._asked}"
            self._asked += 1
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            prompt = [dice.randrange(16, 16 + self.words) for _ in range(context)]
            self.streams[name] = Stream()
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def until(self, done: Callable[[], bool], patience: float = 300.0) -> None:
        """Raises TimeoutError: not done after `patience` seconds."""
        end = time.perf_counter() + patience
        while not done():
            for output in self.engine.step():
                stream = self.streams.get(output.request_id)
                if stream is not None:
                    now = time.perf_counter()
                    stream.stamps += [now] * (len(output.outputs[0].token_ids) - len(stream.stamps))
            if time.perf_counter() > end:
                raise TimeoutError(f"{[len(s.stamps) for s in self.streams.values()]} tokens after {patience} s")

    def tokens(self) -> int:
        """What the slowest user has."""
        return min(len(stream.stamps) for stream in self.streams.values())

    def decode(self, tokens: int) -> None:
        """Until the slowest user has so many more."""
        wanted = self.tokens() + tokens
        self.until(lambda: self.tokens() >= wanted)

    def leave(self) -> None:
        self.engine.abort_request(list(self.streams))
        self.streams.clear()
        self.until(lambda: not self.engine.has_unfinished_requests())


def turn(users: Users, counted: int) -> dict:
    """Each user's gaps between tokens, in milliseconds, over the next `counted` tokens of the slowest."""
    begin = {name: len(stream.stamps) for name, stream in users.streams.items()}
    users.decode(counted)
    gaps = {}
    for name, stream in users.streams.items():
        stamps = stream.stamps[begin[name] - 1 :]
        gaps[name] = [round(1e3 * (after - before), 3) for before, after in zip(stamps, stamps[1:])]
    rates = [1e3 * len(own) / sum(own) for own in gaps.values()]
    return {
        "per_user": round(mean(rates), 2),
        "slowest": round(min(rates), 2),
        "gap_ms": round(median(gap for own in gaps.values() for gap in own), 3),
        "gaps_ms": list(gaps.values()),
    }


def measure(engine, rule: Rule, context: int, users: int, rules: str) -> Iterator[dict]:
    """A sample for each rule, upstream's first; the same users decode in all of them.

    `rules` are keys of RULES in the order of their turns.  `times` of a sample is where the time went meanwhile, by
    process (benchmarks/host_time.py).
    """
    made = Users(engine)
    rule.set("u")
    needed = sum(SETTLE + COUNTED + (LEARN if key == "m" else 0) for key in rules) + 64
    asked = time.perf_counter()
    made.ask(users, context, needed)
    made.until(lambda: made.tokens() >= 1)
    first = sorted(round(stream.stamps[0] - asked, 3) for stream in made.streams.values())
    for key in rules:
        rule.set(key)
        made.decode(SETTLE + (LEARN if key == "m" else 0))
        host_time.reset(engine)
        found = turn(made, COUNTED) | {"times": host_time.collect(engine)}
        yield {"rule": RULES[key], "users": users, "context": context, "first_token_s": first} | found
    made.leave()
