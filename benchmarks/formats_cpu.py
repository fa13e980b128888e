"""Quantized checkpoints through whole engines on the CPU, against transformers with the dequantized weights.

    python -m benchmarks.formats_cpu [--out FILE.json]      writes formats-cpu.json, a quarter of an hour
    python -m benchmarks.formats_cpu --only nvfp4           these recipes again; the file's other rows stay

Each recipe of demo/checkpoint/formats becomes a small checkpoint in the on-disk layout and its bfloat16 twin.  An
engine serves the first over a number of stages; its greedy tokens and the log-probabilities of every prompt position
are compared with transformers' for the twin.  Beside them stands the floor: transformers against itself, bfloat16
against float32, on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import record, whole_engine
from benchmarks.whole_engine import ANSWER, CHUNK
from demo import reference
from demo.checkpoint.formats import RECIPES, Pair, quantize
from demo.checkpoint.formats.write import MULTIMODAL, PLAIN
from demo.checkpoint.geometry import PRESETS
from demo.checkpoint.write import build

OUT = record.FOLDER / "formats-cpu.json"
#: recipe -> stages
RUNS = {
    "mix": (1, 2, 3),
    "gptq": (1, 2, 3),
    "gptq-g32": (1,),
    "gptq-g128": (1,),
    "int6": (1,),
    "int8": (1,),
    "nvfp4": (1, 2, 3),
    "nvfp4-packed": (1,),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats_cpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RECIPE")
    args = parser.parse_args(argv)
    samples, measured, beside = kept(args.out, args.only) if len(args.only) < len(RUNS) else ([], None, {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build(folder / "bf16", PRESETS["groups"])
        for name in args.only:
            stages = RUNS[name]
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
    record.write(args.out, settings | beside, samples, claims, measured=measured)
    return 0 if all(claim.holds for claim in claims) else 1


def kept(path: Path, again: list[str]) -> tuple[list[dict], str, dict]:
    """Rows of a record of this machine that are not measured again, the commits of both, and a note of what is whose.

    Raises SystemExit: another processor measured them
    """
    before, now = record.read(path), record.commit()
    if before["hardware"]["cpu"] != record.hardware()["cpu"]:
        raise SystemExit(f"{path} is of {before['hardware']['cpu']}: measure all of it")
    rows = [row for row in before["samples"] if row["recipe"] not in again]
    notes = [before["settings"].get("note"), f"{', '.join(again)} at {now}"]
    first = before["commit"].split("..")[0]
    return rows, f"{first}..{now}", {"note": "; ".join(note for note in notes if note)}


def compare(name: str, pair: Pair, stages: tuple[int, ...], folder: Path) -> Iterator[dict]:
    """Rows of one recipe over each number of stages, with the floor in each."""
    model = reference.load(pair.dequantized)
    asked = whole_engine.questions(model)
    wanted = whole_engine.prompt_logprobs(model, asked)
    exact = whole_engine.prompt_logprobs(reference.load(pair.dequantized, torch.float32), asked)
    floors = [(more - want).abs() for more, want in zip(exact, wanted, strict=True)]
    for number in stages:
        rows = whole_engine.compare(pair.quantized, number, asked, wanted, folder)
        for row, floor in zip(rows, floors, strict=True):
            beside = {"floor_median": float(floor.median()), "floor_largest": float(floor.max())}
            yield {"recipe": name} | row | beside


if __name__ == "__main__":
    sys.exit(main())
