"""The pipeline scheduler against upstream's through a real server, on three stages without a GPU.

    python -m benchmarks.server_scheduler CHECKPOINT [--rounds 2] [--out FILE]    writes pipeline-cpu-server.json

Servers of the two take turns.  Each serves 3 and then 6 users who ask at the same time, and then a short prompt that
arrives behind a long one, all through the `openai` client; the scheduler writes down every micro-batch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import record as records
from benchmarks.cpu_scheduler import ANSWER, BUDGET, LONG, STAGES
from demo.server import Server, free_port

from . import record
from .clients import FILE, connect, short_behind_long, together

SCHEDULERS = {"upstream": "WatchedUpstream", "pipeline": "WatchedPipeline"}
USERS = (3, 6)


def arguments(name: str) -> list[str]:
    """Of `vllm serve`."""
    own = ["--additional-config", '{"pipeline_scheduler": {"min_decode_batch": 1}}'] if name == "pipeline" else []
    return [
        "--scheduler-cls", f"benchmarks.server_scheduler.watched.{SCHEDULERS[name]}",
        "--no-async-scheduling",
        "--max-model-len", str(LONG + 2 * ANSWER),
        "--max-num-batched-tokens", str(BUDGET),
        "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", str(128 << 20),
        *own,
    ]  # fmt: skip


def one(checkpoint: Path, name: str, folder: Path) -> dict:
    """A server's sample."""
    lines = folder / "micro-batches"
    path = os.pathsep.join(filter(None, (str(records.ROOT), os.environ.get("PYTHONPATH"))))
    env = {FILE: str(lines), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = Server(checkpoint, stages=STAGES, port=free_port(), log=folder / "log", arguments=arguments(name), env=env)
    with server:
        server.wait_until_healthy(600, lambda seconds, words: None)
        client = connect(server.url)
        for users in (1, *USERS):
            together(client, lines, users)  # connections made, kernels compiled and pages touched
        return {
            "scheduler": name,
            "together": [together(client, lines, users) for users in USERS],
            "mixed": short_behind_long(client, lines),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_scheduler", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=record.RECORD)
    asked = parser.parse_args()
    samples = []
    for number in range(asked.rounds):
        for name in SCHEDULERS:
            with tempfile.TemporaryDirectory() as folder:
                samples.append({"round": number} | one(asked.checkpoint, name, Path(folder)))
            print(f"round {number}, {name}: {samples[-1]['mixed']['short_first_token_s']} s", flush=True)
    claims = record.claims(samples)
    settings = {"command": "python -m benchmarks.server_scheduler CHECKPOINT", "stages": STAGES, "tokens": ANSWER}
    records.write(asked.out, settings | {"budget": BUDGET, "long": LONG}, samples, claims)
    for claim in claims:
        print(f"{claim.name}: {claim.value} {claim.unit}, aim {claim.compare} {claim.aim}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
