"""Start engine_job.py in a process of its own and wait for its result; for the tests and for benchmarks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAM = Path(__file__).parent / "engine_job.py"
#: What every job asks for unless its engine's arguments say otherwise.
SMALL = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}


class EngineEnded(RuntimeError):
    """The engine's process ended with another status than 0."""


def run_engine(
    folder: Path,
    model: Path,
    batches: list[list[dict]],
    engine: dict,
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> dict:
    """What engine_job.py says of `batches`.

    Args:
        folder: for the job's files, log.txt among them
        engine: arguments of `LLM` beside and above SMALL
        environment: variables beside this process's
        limit: seconds after which it is killed

    Raises:
        EngineEnded: with the end of its log
        subprocess.TimeoutExpired: after `limit` seconds
    """
    job = {"model": str(model), "engine": SMALL | engine, "batches": batches}
    (folder / "job.json").write_text(json.dumps(job))
    # A partition of the caller's shell would silently replace the one that a run is about.
    inherited = {key: value for key, value in os.environ.items() if key != "VLLM_PP_LAYER_PARTITION"}
    log = folder / "log.txt"
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, PROGRAM, folder / "job.json", folder / "result.json"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=limit,
            env={**inherited, **(environment or {})},
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        raise EngineEnded(f"engine job ended with status {done.returncode}; end of {log}:\n{tail}")
    return json.loads((folder / "result.json").read_text())
