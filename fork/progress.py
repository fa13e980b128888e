"""What the tool says while it works: to stderr, so that stdout holds results only."""

from __future__ import annotations

import sys

from tqdm import tqdm


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bar(what: str, total: int) -> tqdm:
    """Bytes with a rate and the time left. Silent where nobody watches (a pipe, a build log)."""
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False)
