"""What a server's `/metrics` say."""

import re
import time
from urllib.request import urlopen


def table_reads(url: str, within: float = 30) -> dict[str, dict[str, float]]:
    """Counters of the n-gram table's reads by the stage that reads, as `/metrics` has them.

    A stage that is in the middle of something is left out of a scrape, so one without any is taken again.
    """
    deadline = time.monotonic() + within
    while not (found := _scraped(url)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _scraped(url: str) -> dict[str, dict[str, float]]:
    with urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if match := re.match(r'vllm:ngram_table_(\w+)_total\{.*stage="(\d+)".*\} (\S+)$', line):
            found.setdefault(match[2], {})[match[1]] = float(match[3])
    return found
