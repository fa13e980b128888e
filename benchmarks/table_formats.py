"""N-gram tables in every published row format through whole engines on the CPU, against transformers.

    python -m benchmarks.table_formats [--out FILE.json]      writes formats-ple-cpu.json, five minutes on two idle cores

A small checkpoint gets its table recoded (demo/checkpoint/table_formats.py).  An engine serves it; transformers runs the
same model with the dequantized table, so that all that may differ is what differs between the two for bf16 rows, the
first case.  That rows from files and from memory are equal to the last bit is a unit test's
(tests/ple_store/test_formats.py); here each format is served in one of the two ways.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import record, whole_engine
from benchmarks.whole_engine import ANSWER, CHUNK
from demo import reference
from demo.checkpoint.geometry import geometry
from demo.checkpoint.table_formats import recode
from demo.checkpoint.write import build

OUT = record.FOLDER / "formats-ple-cpu.json"
IN_FILES, IN_MEMORY = {"host_file_gather": True}, {"host_file_gather": False, "cpu_offload": False}
#: form -> where rows come from, stages
CASES = {
    "plain": ("memory", 1),
    "scaled": ("files", 2),
    "scaled-f32": ("memory", 1),
    "row-scaled": ("files", 1),
    "row-scaled-int8": ("memory", 1),
    "nvfp4": ("files", 2),
}
LARGEST = 0.2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_formats", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    samples: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build(folder / "bf16", geometry("tiny"))
        for form, (place, stages) in CASES.items():
            twin = recode(folder / "bf16", folder / form, form)
            error = relative_error(folder / "bf16", twin)
            model = reference.load(twin)
            asked = whole_engine.questions(model)
            wanted = whole_engine.prompt_logprobs(model, asked)
            engram = IN_FILES if place == "files" else IN_MEMORY
            for row in whole_engine.compare(folder / form, stages, asked, wanted, folder, engram_config=engram):
                samples.append({"form": form, "table_error": error, "rows_from": place} | row)
                print(json.dumps(samples[-1]), flush=True)
            write(args.out, samples)
    return 0 if all(claim.holds for claim in claims(samples)) else 1


def claims(samples: list[dict]) -> list[record.Claim]:
    different = sum(row["tokens"] - row["tokens_equal"] for row in samples)
    largest = max(row["largest_answer"] for row in samples)
    return [
        record.Claim("greedy tokens that differ from the dequantized model's", different, "tokens", 0, "<="),
        record.Claim("largest log-probability difference of an answer, nats", largest, "nats", LARGEST, "<="),
    ]


def write(out: Path, samples: list[dict]) -> None:
    settings = {"command": "python -m benchmarks.table_formats", "preset": "tiny", "chunk": CHUNK, "answer": ANSWER}
    record.write(out, settings, samples, claims(samples))


def relative_error(source: Path, twin: Path) -> float:
    """Of the dequantized table, as a root mean square relative to the bf16 one's."""
    tables = []
    for folder in (source, twin):
        rows = {}
        for path in folder.glob("*.safetensors"):
            rows |= {name: part for name, part in load_file(path).items() if "ngram_embedding" in name}
        tables.append(torch.cat([rows[name].float() for name in sorted(rows)]))
    return float((tables[0] - tables[1]).norm() / tables[0].norm())


if __name__ == "__main__":
    sys.exit(main())
