"""One engine: rates with a cold and a warm page cache, and where the time of its steps went."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from benchmarks import host_time
from benchmarks.pipeline_rates.rates import Stream, Users, turn
from benchmarks.ple_reads.measure import disk_bytes, drop, memory

SETTLE, COUNTED = 8, 96


class Sampling(Users):
    """Users who sample, so that their n-grams are new ones: without weights the likeliest token is always the same.

    The same case asks for the same tokens again, so that a warm page cache has their rows.
    """

    def __init__(self, engine, case: str) -> None:
        super().__init__(engine)
        self._case = case

    def ask(self, users: int, context: int, tokens: int) -> None:
        from vllm import SamplingParams

        for _ in range(users):
            dice = random.Random(f"{self._case} {self._asked}")
            name = f"user-{self._asked}"
            self._asked += 1
            params = SamplingParams(
                temperature=1.0, seed=self._asked, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            prompt = [dice.randrange(16, 490) for _ in range(context)]
            self.streams[name] = Stream()
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)


class Pinned:
    """Memory that this process, where the engine runs too, has pinned: the table's, and what torch pins besides.

    Neither is in the kernel's count of locked memory.
    """

    def __init__(self, stock: bool) -> None:
        """``stock``: pin a table as upstream does, in torch's memory."""
        import torch

        from vllm.models.qwen4_exp.ple_store import pinned

        self._tables, exact = 0, pinned.page_locked

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if stock:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            made = exact(shape, dtype)
            self._tables += made.nbytes
            return made

        pinned.page_locked = allocate

    def bytes(self) -> int:
        """Now."""
        import torch

        # What torch keeps for later allocations is pinned too.
        here = torch.cuda.host_memory_stats()["allocated_bytes.current"] if torch.cuda.is_available() else 0
        return self._tables + here


def counters() -> dict[str, float]:
    """Of the reads of this engine's workers; empty with a table in memory."""
    from vllm.v1.metrics import ngram_table

    answers = [made for name in ngram_table._sockets() if (made := ngram_table._ask(name)) is not None]
    return {name: sum(made["counters"][name] for made in answers) for name in ngram_table.NAMES} if answers else {}


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def run(job: dict) -> dict:
    from vllm import LLM

    pinned = Pinned(job["stock"])
    free, began = available(), time.perf_counter()
    llm = LLM(**job["engine"])
    engine, started = llm.llm_engine, time.perf_counter() - began
    found = {
        "start_s": round(started, 1),
        "memory_taken": free - available(),
        "prefill": [],
        "decode": [],
    }
    files = [Path(path) for path in job["files"]]
    measure_prefill(engine, 512)  # compiles what a prompt needs
    for context in job["contexts"]:
        for cache in ("cold", "warm"):
            # Warm: the rows of this very prompt were read a moment ago.
            if cache == "cold":
                drop(files)
            found["prefill"].append(measure_prefill(engine, context) | {"cache": cache})
    for users in job["users"]:
        for cache in ("cold", "warm"):
            if cache == "cold":
                drop(files)
            found["decode"].append(measure_decode(engine, users, job["decode_context"]) | {"cache": cache})
    return found | {"locked_bytes": memory()["locked"], "pinned_bytes": pinned.bytes()}


def measure_prefill(engine, context: int) -> dict:
    users = Sampling(engine, f"a prompt of {context}")
    before, began = counters(), time.perf_counter()
    users.ask(1, context, 1)
    users.until(lambda: users.tokens() >= 1)
    seconds = time.perf_counter() - began
    users.leave()
    return {
        "context": context,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(context / seconds, 1),
        "reads": _since(before),
    }


def measure_decode(engine, users: int, context: int) -> dict:
    made = Sampling(engine, f"{users} users")
    made.ask(users, context, SETTLE + COUNTED + 64)
    made.until(lambda: made.tokens() >= 1)
    made.decode(SETTLE)
    host_time.reset(engine)
    before, disk = counters(), disk_bytes()
    found = turn(made, COUNTED)
    read = _since(before) | {"kernel_disk_bytes": disk_bytes() - disk}
    times = host_time.collect(engine)
    made.leave()
    return {
        "users": users,
        "context": context,
        "reads": read,
        "gpu": host_time.decode_gpu_ms(times),
        "times": times,
    } | found


def _since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in counters().items()}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(given)))
