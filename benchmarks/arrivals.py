"""Who shares a micro-batch under upstream's scheduler, when users ask at the same time: a run, not a model.

    python -m benchmarks.arrivals CHECKPOINT [--users 3 5 7] [--stages 3] [--rounds 3]     writes pipeline-arrivals-cpu.json

The engine core runs in a process of its own, as in a server, so requests reach it one after the other while it works.
Its scheduler notes each step's requests, empty steps included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.host_time import ENGINE, prompt

OUT = record.FOLDER / "pipeline-arrivals-cpu.json"
#: Tells the scheduler, in the engine core's process, where to write.
NOTES = "BENCHMARK_ARRIVALS_NOTES"
TOKENS = 24


def noting_scheduler() -> type:
    from vllm.v1.core.sched.scheduler import Scheduler

    class Noting(Scheduler):
        """Upstream's, with a line for each step: its requests, and behind a `+` how many of them are new."""

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            output = super().schedule(*args, **kwargs)
            with Path(os.environ[NOTES]).open("a") as notes:
                new = f"+{len(output.scheduled_new_reqs)}" if output.scheduled_new_reqs else ""
                notes.write(f"{len(output.num_scheduled_tokens)}{new}\n")
            return output

    return Noting


def __getattr__(name: str) -> type:
    # vLLM imports the class by this module's name; importing it here must not need vLLM.
    if name == "Noting":
        return noting_scheduler()
    raise AttributeError(name)


def rounds(checkpoint: str, options: argparse.Namespace, out: Path) -> None:
    from vllm import LLM, SamplingParams

    notes = Path(os.environ[NOTES])
    llm = LLM(
        checkpoint,
        pipeline_parallel_size=options.stages,
        scheduler_cls="benchmarks.arrivals.Noting",
        additional_config={"quiet_steps": options.quiet},
        **ENGINE,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    samples = []
    for number in range(options.rounds + 1):
        for users in options.users:
            notes.write_text("")
            llm.generate([{"prompt_token_ids": prompt(user)} for user in range(users)], sampling, use_tqdm=False)
            steps = notes.read_text().split()
            if number:  # the first compiles
                samples.append(describe(steps, users) | {"round": number - 1, "quiet_steps": options.quiet})
    out.write_text(json.dumps(samples))


def describe(steps: list[str], users: int) -> dict[str, Any]:
    """How many prompts started in each micro-batch that had any, and sizes of those that decoded."""
    first = [int(step.partition("+")[2]) for step in steps if "+" in step]
    decoding = Counter(int(step) for step in steps if step.isdigit() and step != "0")
    # Sizes that are used for most of the answer, not while the first and the last come and go.
    steady = {str(size): count for size, count in sorted(decoding.items()) if count > TOKENS // 2}
    return {"users": users, "started_together": first, "decoded_together": steady, "steps": steps}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arrivals", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--users", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one-engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one_engine:
        rounds(options.checkpoint, options, options.one_engine)
        return 0
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        for quiet in ([], ["--quiet"]):
            out = Path(folder) / "out.json"
            command = [sys.executable, "-m", "benchmarks.arrivals", *arguments, "--one-engine", str(out), *quiet]
            subprocess.run(command, check=True, env=env | {NOTES: f"{folder}/notes"}, stdin=subprocess.DEVNULL)
            samples += json.loads(out.read_text())
    settings = {"stages": options.stages, "users": options.users, "tokens": TOKENS, "rounds": options.rounds}
    record.write(OUT, settings | {"checkpoint": Path(options.checkpoint).name, "engine": ENGINE}, samples, [])
    for sample in samples:
        print({key: value for key, value in sample.items() if key != "steps"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
