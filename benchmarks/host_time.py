"""Where a step's host time goes: the engine core and every stage, by phase and kind of step.

    python -m benchmarks.host_time CHECKPOINT [--stages 2 3] [--users 1 3] [--tokens 64] [--out pipeline-host-time-cpu.json]
        [--engine '{"max_model_len": 1024}'] [--gpus "2 x NVIDIA H200"] [--rounds 2]
        [--variant now={} --variant 'before={"quiet_steps": false, "late_receive": false}']

An engine for each number of stages, in processes of its own as a server has it, decodes for each number of users after
a round that is not counted.  Variants are keys of additional_config; their engines take turns, ROUNDS times each, since
other work on a machine comes and goes.  For use by another benchmark:

    reset(engine); …; figures = collect(engine)             an LLM or LLMEngine
    await areset(engine); …; figures = await acollect(engine)       an AsyncLLM

of an engine that was given `additional_config={"stage_times": True}` (vllm/v1/stage_times).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import cpu_scheduler, record

DEFAULT_OUT = "pipeline-host-time-cpu.json"
#: What a CPU run is given unless --engine says otherwise; enough blocks for every user, and no more.
ENGINE = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 128 << 20}
PROMPT = 24


class StageTimesOff(RuntimeError):
    """The engine was not asked to time its stages."""


def reset(engine: Any) -> None:
    """Forget what an engine measured so far. Raises StageTimesOff."""
    _check(engine)
    engine.collective_rpc("reset_stage_times")


def collect(engine: Any) -> dict[str, Any]:
    """What an engine measured since the last reset: a summary for each part. Raises StageTimesOff."""
    _check(engine)
    return _by_part(engine.collective_rpc("stage_times"))


async def areset(engine: Any) -> None:
    """`reset` of an AsyncLLM."""
    _check(engine)
    await engine.collective_rpc("reset_stage_times")


async def acollect(engine: Any) -> dict[str, Any]:
    """`collect` of an AsyncLLM."""
    _check(engine)
    return _by_part(await engine.collective_rpc("stage_times"))


def _check(engine: Any) -> None:
    config = getattr(engine, "llm_engine", engine).vllm_config.additional_config
    if not (isinstance(config, dict) and config.get("stage_times")):
        raise StageTimesOff('the engine has no times; build it with additional_config={"stage_times": True}')


def _by_part(processes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """{"engine core": {"seconds", "steps": {kind: {"whole", "phases", "gpu"}}}, "stage 0": …, "stage 0, answers": …}"""
    return {
        summary["part"]: {"seconds": summary["seconds"], "steps": summary["steps"]}
        for summaries in processes
        for summary in summaries
    }


def decode_gpu_ms(figures: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a decode step, by what the GPU did: `forward`, and `between` the end of one and the next one's start.

    Empty without a GPU.
    """
    parts = [part["steps"]["decode"]["gpu"] for part in figures.values() if "decode" in part["steps"]]
    return {name: series["mean_ms"] for gpu in parts for name, series in gpu.items()}


def rows(figures: dict[str, Any], **what: Any) -> list[dict[str, Any]]:
    """One sample for each part, kind of step and phase; `what` goes into each.  "whole" is the phases' sum; longest first."""
    samples = []
    for part, found in figures.items():
        for kind, step in found["steps"].items():
            whole = step["whole"]
            phases = dict(sorted(step["phases"].items(), key=lambda item: -item[1]["total_ms"]))
            named = {"whole": whole} | phases | {f"GPU {name}": s for name, s in step["gpu"].items()}
            for phase, series in named.items():
                per_step = round(series["total_ms"] / whole["count"], 4)
                samples.append(what | {"part": part, "step": kind, "phase": phase, "ms_per_step": per_step} | series)
    return samples


def prompt(user: int) -> list[int]:
    """A user's own."""
    return cpu_scheduler.prompt(PROMPT, user)


def decode(llm: Any, users: int, tokens: int) -> dict[str, float]:
    """All users ask at once, greedily, and get as many tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt(user)} for user in range(users)], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 4), "tokens_per_s_per_user": round(tokens / seconds, 3)}


def one_engine(checkpoint: str, options: argparse.Namespace) -> None:
    from vllm import LLM

    (stages,), ((variant, switches),) = options.stages, map(named, options.variant)
    arguments = ENGINE | json.loads(options.engine)
    additional = arguments.pop("additional_config", {}) | switches | {"stage_times": True}
    llm = LLM(checkpoint, pipeline_parallel_size=stages, additional_config=additional, **arguments)
    samples = []
    for users in options.users:
        decode(llm, users, min(8, options.tokens))
        reset(llm)
        rate = decode(llm, users, options.tokens)
        what = {"variant": variant, "stages": stages, "users": users}
        samples += rows(collect(llm), **what, tokens_per_s_per_user=rate["tokens_per_s_per_user"])
    options.one_engine.write_text(json.dumps(samples))


def named(variant: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON, taken apart."""
    name, _, switches = variant.partition("=")
    return name, json.loads(switches)


def table(samples: list[dict[str, Any]]) -> str:
    """For reading on a terminal."""
    lines, seen = [], None
    for sample in samples:
        head = (sample["variant"], sample["stages"], sample["users"], sample["part"], sample["step"])
        if head != seen:
            seen = head
            lines.append("{}, {} stages, {} users, {}: {} steps".format(*head))
        lines.append(
            "    {phase:14} {ms_per_step:9.3f} ms a step   p50 {p50_ms:8.3f}   p90 {p90_ms:8.3f}   {count:6} times".format(
                **sample
            )
        )
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each user gets")
    parser.add_argument("--out", default=DEFAULT_OUT, help=f"a name in {record.FOLDER.name}/, or a path")
    parser.add_argument("--engine", default="{}", help="more arguments of LLM, as JSON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--variant", action="append", help="NAME=JSON, keys of additional_config; now={} unless given")
    parser.add_argument("--gpus", help='what the record calls them, e.g. "2 x NVIDIA H200"')
    parser.add_argument("--one-engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.variant = options.variant or ["now={}"]
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.one_engine:
        one_engine(options.checkpoint, options)
        return 0
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for number, stages, variant in product(range(options.rounds), options.stages, options.variant):
            command = [sys.executable, "-m", "benchmarks.host_time", options.checkpoint, "--engine", options.engine]
            command += ["--tokens", str(options.tokens), "--users", *map(str, options.users)]
            command += ["--stages", str(stages), "--variant", variant, "--one-engine", str(out)]
            subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL)
            samples += [{"round": number} | sample for sample in json.loads(out.read_text())]
    settings = {"stages": options.stages, "users": options.users, "tokens": options.tokens, "prompt": PROMPT}
    settings |= {"rounds": options.rounds, "variants": dict(map(named, options.variant))}
    settings |= {"checkpoint": Path(options.checkpoint).name, "engine": ENGINE | json.loads(options.engine)}
    path = record.FOLDER / options.out if Path(options.out).parent == Path() else Path(options.out)
    record.write(path, settings, samples, [], gpus=options.gpus)
    print(table(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
