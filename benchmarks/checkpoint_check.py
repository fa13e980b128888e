"""How long `vllm ampere check` takes on checkpoints of the published geometry, and what it prints.

    python -m benchmarks.checkpoint_check [--runs 3] [--out docs/ampere-multigpu/benches/formats-check.json]

The checkpoints have the published tensors' names, dtypes and shapes and no data: their files are sparse. The record
holds every run, and one summary, from which docs/ampere-multigpu/check.md has its sample output.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import FOLDER, Claim, write
from demo.checkpoint import mixes, sparse

#: name -> (what it is, quantization_config, form of each module)
CHECKPOINTS = {
    "bf16": ("BF16", None, lambda kind, module: sparse.Plain()),
    "gptq": ("GPTQ INT4 g128", mixes.gptq_config(), mixes.gptq_mix()),
    "mix": (
        "compressed-tensors INT4/INT6/INT8, all groups for one target",
        mixes.autoround_config(shared_target=True),
        mixes.autoround_mix,
    ),
}
#: the one whose output the page shows
SHOWN = "mix"
FILES = 40
VLLM = str(Path(sys.executable).parent / "vllm")


def build(name: str, out: Path) -> None:
    """Write one of CHECKPOINTS."""
    _, quantization, form = CHECKPOINTS[name]
    config = mixes.PUBLISHED | ({"quantization_config": quantization} if quantization else {})
    sparse.write(out, config, sparse.published(config, form), files=FILES)


def measure(name: str, path: Path, run: int) -> dict[str, Any]:
    """One run in a process of its own, and the same steps inside this one.

    Processor seconds beside those of the clock: a machine with other work to do adds to the latter only.
    """
    from vllm.ampere.checkpoint import read
    from vllm.ampere.findings import findings

    made, wall, cpu = command(path)
    _, import_cpu = _timed([sys.executable, "-c", "import vllm.entrypoints.cli.main"])
    started = time.process_time()
    checkpoint = read(path)
    read_cpu = time.process_time() - started
    findings(checkpoint)
    findings_cpu = time.process_time() - started - read_cpu
    return {
        "checkpoint": name,
        "run": run,
        "file_bytes": made["file_bytes"],
        "tensors": made["tensors"],
        "header_bytes": made["file_bytes"] - sum(item["bytes"] for item in made["classes"]),
        "command_s": round(wall, 2),
        "command_cpu_s": round(cpu, 2),
        "import_cpu_s": round(import_cpu, 2),
        "read_cpu_s": round(read_cpu, 2),
        "findings_cpu_s": round(findings_cpu, 2),
    }


def command(path: Path, *options: str) -> tuple[dict[str, Any], float, float]:
    """(its JSON, seconds, processor seconds) of `vllm ampere check`."""
    printed: list[str] = []
    wall, cpu = _timed([VLLM, "ampere", "check", str(path), "--json", *options], printed)
    return json.loads(printed[0]), wall, cpu


def _timed(words: list[str], printed: list[str] | None = None) -> tuple[float, float]:
    """(seconds, processor seconds) of a process; its stdout goes into `printed`. Status 1 is a refusal, not a fault."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wall = time.perf_counter() - started
    if done.returncode not in (0, 1) or (done.returncode and not done.stdout):
        raise SystemExit(done.stderr)
    if printed is not None:
        printed.append(done.stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER / "formats-check.json")
    args = parser.parse_args()
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in CHECKPOINTS:
            path = Path(folder) / name
            build(name, path)
            samples += [measure(name, path, run) for run in range(args.runs)]
        shown = Path(folder) / SHOWN
        repaired = Path(folder) / "repaired"
        summary, *_ = command(shown, "-pp", "3", "--repair", str(repaired))
    # The folder was a temporary one; the page shows a name that a reader would have.
    text = json.dumps(summary).replace(str(repaired), "/models/repaired").replace(str(shown), "/models/mix")
    settings = {
        "checkpoints": {name: about for name, (about, *_) in CHECKPOINTS.items()},
        "geometry": "published: 48 layers, 512 experts, n-gram table of 320,001,536 rows; sparse files without data",
        "runs": args.runs,
        "vllm_help_cpu_s": round(_timed([VLLM, "--help"])[1], 2),
        "summary": json.loads(text),
    }
    slowest = max(sample["command_cpu_s"] for sample in samples)
    write(args.out, settings, samples, [Claim("processor time of the slowest run", slowest, "s", 10, "<=")])
    print(f"{args.out}: slowest run {slowest} s")


if __name__ == "__main__":
    main()
