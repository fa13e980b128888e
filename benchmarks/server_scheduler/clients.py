"""Users of a running server, each a streamed completion of the `openai` client in a thread of its own."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.cpu_scheduler import ANSWER, LONG, SHORT, STAGES, prompt
from demo.client import MODEL

#: Where the scheduler writes its micro-batches; the engine core, which has the scheduler, inherits it.
FILE = "WATCHED_MICRO_BATCHES"
#: Micro-batches of the long prompt that are on their way or done when the short one is sent.
BEHIND = 6


def connect(url: str):
    """A client for all users; importing and building one takes as long as a prompt of theirs."""
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none")


def ask(client, tokens: list[int], length: int) -> list[float]:
    """When each token came, in seconds of time.time(); the first stamp is that of sending."""
    stamps = [time.time()]
    stream = client.completions.create(
        model=MODEL, prompt=tokens, max_tokens=length, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    for event in stream:
        stamps += [time.time()] * len(event.choices[0].token_ids or ()) if event.choices else []
    return stamps


def micro_batches(path: Path, since: float) -> list[dict]:
    """What the scheduler wrote since then; a line that is still being written is left out."""
    lines = path.read_text().split("\n")[:-1]
    return [line for line in map(json.loads, lines) if line["at"] >= since]


def rows(made: list[dict], begun: float) -> list[list]:
    """Seconds since the beginning, requests that decode, all requests, tokens."""
    return [[round(one["at"] - begun, 3), one["decodes"], one["requests"], one["tokens"]] for one in made]


def together(client, path: Path, users: int) -> dict:
    """Everybody asks at once; micro-batches are those between the last first token and the first end."""
    begun = time.time()
    with ThreadPoolExecutor(users) as pool:
        every = list(
            pool.map(lambda user: ask(client, prompt(10 + user, seed=10 * users + user), ANSWER), range(users))
        )
    start, stop = max(stamps[1] for stamps in every), min(stamps[-1] for stamps in every)
    made = micro_batches(path, begun)
    steady = [one["decodes"] for one in made if start <= one["at"] <= stop][STAGES:-STAGES]
    rates = [(len(stamps) - 2) / (stamps[-1] - stamps[1]) for stamps in every]
    return {
        "users": users,
        "micro_batches": rows(made, begun),
        "steady": steady,
        "tokens_per_s_per_user": [round(rate, 2) for rate in rates],
        "first_token_s": [round(stamps[1] - stamps[0], 3) for stamps in every],
    }


def short_behind_long(client, path: Path) -> dict:
    """Seconds to the first token of a short prompt that comes behind a long one, and of the long one."""
    begun = time.time()
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask, client, prompt(LONG, seed=5), 8)
        while len(micro_batches(path, begun)) < BEHIND and not long.done():
            time.sleep(0.02)
        short = ask(client, prompt(SHORT, seed=6), 8)
        stamps = long.result()
    made = micro_batches(path, begun)
    waited = [one for one in made if short[0] <= one["at"] <= short[1]]
    return {
        "short_sent_s": round(short[0] - begun, 3),
        "short_first_token_s": round(short[1] - short[0], 3),
        "short_waited_micro_batches": len(waited),
        "long_first_token_s": round(stamps[1] - stamps[0], 3),
        "micro_batches": rows(made, begun),
    }
