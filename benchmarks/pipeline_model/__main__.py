"""What the pipeline model predicts, as records and a picture.

    python -m benchmarks.pipeline_model published       both RTX 3090 machines and two H200s, beside what they measured
    python -m benchmarks.pipeline_model timeline        the picture of the pipeline page
    python -m benchmarks.pipeline_model compare --stages 3 --scheduler CLASS [--scheduler CLASS ...]

`compare` puts scheduler classes beside upstream's and prints; `--out` writes a record.
"""

from __future__ import annotations

import os

# Before vLLM is imported: hundreds of configurations are built, each of which would describe itself.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import record

from . import cases, published, results, workloads
from .arranged import in_groups
from .compare import compare, machine_of
from .configs import UPSTREAM_ASYNC
from .tables import RECORD
from .timeline import Panel, draw

PICTURE = record.FOLDER.parent / "pipeline-timeline.svg"
#: milliseconds of the picture, and where they begin behind the last first token
DRAWN_MS, SKIPPED_MS = 100.0, 400.0


def write_published() -> None:
    calibrations = [published.calibrate(own_bytes) for own_bytes in (True, False)]
    samples = list(cases.h200_cases())
    for calibration in calibrations:
        samples += [*cases.decode_cases(calibration), *cases.prefill_cases(calibration)]
    samples += [*cases.host_cases(calibrations[0]), *cases.partition_cases(calibrations[0])]
    merged = [sample for sample in samples if sample.get("arrangement") == "merged" and sample["own_bytes"]]
    worst = max(abs(error(sample)) for sample in merged)
    record.write(
        RECORD,
        {
            "command": "python -m benchmarks.pipeline_model published",
            "calibrations": [asdict(one) | _singles(one) for one in calibrations],
            "bandwidth_gbs": published.BANDWIDTH_GBS,
            "host": {"host_ms": cases.HOST.host_ms, "empty_ms": cases.HOST.empty_ms},
            "context": published.CONTEXT,
        },
        samples,
        [record.Claim("worst error of a rate with several users, in one micro-batch", round(worst, 3), "", 0.15, "<=")],
    )


def _singles(calibration: published.Calibration) -> dict:
    return {"singles": {machine.name: round(calibration.single(machine), 1) for machine in published.MACHINES}}


def error(sample: dict) -> float:
    """Prediction over the middle of what was published, less one."""
    low, high = sample["published"]
    return sample["per_user"] / ((low + high) / 2) - 1


def write_timeline() -> None:
    calibration = published.calibrate(True)
    machine = published.SIX
    panels = []
    for title, groups, layers in (
        ("all in one micro-batch", 1, None),
        ("four micro-batches", 4, None),
        ("six micro-batches, the last stage also has the output layer", 6, None),
        ("six micro-batches, 9 layers a stage and 3 beside the output layer", 6, (9, 9, 9, 9, 9, 3)),
    ):
        cost = calibration.cost(machine)
        cost = replace(cost, layers=layers or cost.layers)
        serving = replace(machine.serving, scheduler=in_groups(groups))
        trace = workloads.decoding(serving, cost, cases.HOST, 7)
        begin = results.window(trace)[0] + SKIPPED_MS
        rate = results.summary(trace)["per_user"]
        panels.append(Panel(f"7 users, {title}: {rate:.0f} tok/s each", trace, begin, begin + DRAWN_MS))
    PICTURE.write_text(draw(panels))


def write_compare(stages: int, schedulers: list[str], out: Path | None) -> None:
    machine = machine_of(stages)
    calibration = published.calibrate(True)
    samples = list(compare(calibration, machine, [UPSTREAM_ASYNC, *schedulers]))
    for sample in samples:
        rate = f"{sample['per_user']:.1f} tok/s each, slowest {sample['slowest']:.1f}" if "per_user" in sample else ""
        print(
            f"{sample['situation']:32} {sample['scheduler'].rsplit('.', 1)[-1]:24} "
            f"last first token {sample['last_first_token_s']:6.2f} s  {rate}"
        )
    if out is not None:
        settings = {"command": " ".join(sys.argv[1:]), "machine": machine.name, "calibration": asdict(calibration)}
        record.write(out, settings, samples, [])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_model", description=__doc__.splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("published", help=f"write {RECORD.name}")
    what.add_parser("timeline", help=f"write {PICTURE.name}")
    sides = what.add_parser("compare", help="scheduler classes side by side")
    sides.add_argument("--stages", type=int, default=6, help="3 or 6: which published machine (default: 6)")
    sides.add_argument("--scheduler", action="append", default=[], help="dotted name of a class, beside upstream's")
    sides.add_argument("--out", type=Path, help="write a record there")
    asked = parser.parse_args()
    if asked.what == "published":
        write_published()
    elif asked.what == "timeline":
        write_timeline()
    else:
        write_compare(asked.stages, asked.scheduler, asked.out)


if __name__ == "__main__":
    main()
