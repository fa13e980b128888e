"""Quantized checkpoints through whole engines on the CPU, against transformers with the dequantized weights.

    python -m benchmarks.formats_cpu [--out FILE.json]      writes formats-cpu.json, a quarter of an hour

Each recipe of demo/checkpoint/formats becomes a small checkpoint in the on-disk layout and its bfloat16 twin.  An
engine serves the first over a number of stages; its greedy tokens and the log-probabilities of every prompt position
are compared with transformers' for the twin.  Beside them stands the floor: transformers against itself, bfloat16
against float32, on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import record
from demo import reference
from demo.checkpoint.formats import RECIPES, Pair, quantize
from demo.checkpoint.formats.write import MULTIMODAL, PLAIN
from demo.checkpoint.geometry import PRESETS
from demo.checkpoint.write import build
from tests.e2e.compare import prompt_difference
from tests.e2e.prompts import decisive

OUT = record.FOLDER / "formats-cpu.json"
#: recipe -> stages
RUNS = {"mix": (1, 2, 3), "gptq": (1, 2, 3), "gptq-g32": (1,), "gptq-g128": (1,), "int6": (1,), "int8": (1,)}
#: tokens of the prompts: beyond the sparse budget of 64, and within one chunk
LENGTHS, ANSWER, CHUNK = (150, 23), 12, 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats_cpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    samples: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build(folder / "bf16", PRESETS["groups"])
        for name, stages in RUNS.items():
            prefix = MULTIMODAL if RECIPES[name].layout == "gptq" else PLAIN
            pair = quantize(folder / "bf16", folder / name, RECIPES[name], prefix=prefix, with_mtp=name == "mix")
            for row in compare(name, pair, stages, folder):
                samples.append(row)
                print(json.dumps(row), flush=True)
    different = sum(row["tokens"] - row["tokens_equal"] for row in samples)
    largest = max(row["largest_answer"] for row in samples)
    floor = max(row["floor_largest"] for row in samples)
    claims = [
        record.Claim("greedy tokens that differ from the dequantized model's", different, "tokens", 0, "<="),
        record.Claim("largest log-probability difference of an answer, nats", largest, "nats", floor, "<="),
    ]
    settings = {"command": "python -m benchmarks.formats_cpu", "preset": "groups", "chunk": CHUNK, "answer": ANSWER}
    record.write(args.out, settings, samples, claims)
    return 0 if all(claim.holds for claim in claims) else 1


def compare(name: str, pair: Pair, stages: tuple[int, ...], folder: Path) -> list[dict]:
    model = reference.load(pair.dequantized)
    asked = [decisive(model, length, ANSWER, seed=length) for length in LENGTHS]
    wanted = [reference.prompt_logprobs(model, prompt) for prompt, _ in asked]
    exact = reference.load(pair.dequantized, torch.float32)
    floors = [(reference.prompt_logprobs(exact, p) - w).abs() for (p, _), w in zip(asked, wanted, strict=True)]
    del exact
    rows = []
    for number in stages:
        results = serve(pair.quantized, number, [prompt for prompt, _ in asked], folder)
        for result, (prompt, answer), want, floor in zip(results, asked, wanted, floors, strict=True):
            difference = prompt_difference(result, want)
            pairs = zip(result["logprobs"], answer.logprobs, strict=True)
            rows.append(
                {
                    "recipe": name,
                    "stages": number,
                    "prompt": len(prompt),
                    "tokens": ANSWER,
                    "tokens_equal": sum(a == b for a, b in zip(result["tokens"], answer.tokens, strict=True)),
                    "largest_answer": max(abs(ours - theirs) for ours, theirs in pairs),
                    "prompt_median": difference.median,
                    "prompt_largest": difference.largest,
                    "floor_median": float(floor.median()),
                    "floor_largest": float(floor.max()),
                }
            )
    return rows


def serve(model: Path, stages: int, prompts: list[list[int]], folder: Path) -> list[dict]:
    """One engine, all prompts in one batch; what engine_job.py says about each."""
    engine = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "pipeline_parallel_size": stages,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": False,
    }
    batch = [{"prompt": prompt, "length": ANSWER, "prompt_logprobs": True} for prompt in prompts]
    job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    job.write_text(json.dumps({"model": str(model), "engine": engine, "batches": [batch]}))
    with log.open("wb") as out:
        program = record.ROOT / "tests/e2e/engine_job.py"
        done = subprocess.run([sys.executable, program, job, result], stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{model} over {stages} stages ended with status {done.returncode}:\n{log.read_text()[-4000:]}")
    return json.loads(result.read_text())["batches"][0]


if __name__ == "__main__":
    sys.exit(main())
