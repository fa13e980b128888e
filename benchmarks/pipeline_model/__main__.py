"""What the pipeline model predicts, as records and a picture.

    python -m benchmarks.pipeline_model published       both RTX 3090 machines and two H200s, beside what they measured
    python -m benchmarks.pipeline_model timeline        the picture of the pipeline page
    python -m benchmarks.pipeline_model compare --stages 3 --scheduler CLASS [--scheduler CLASS ...]

`compare` puts scheduler classes beside upstream's and prints; `--out` writes a record.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Before vLLM is imported: hundreds of configurations are built, each of which would describe itself.  Not for whoever
    # imports this, whose later processes would keep silent too.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import record

from . import cases, published, results, workloads
from .arranged import in_groups
from .compare import compare, machine_of
from .tables import RECORD
from .timeline import Panel, draw

PICTURE = record.FOLDER.parent / "pipeline-timeline.svg"
#: milliseconds of the picture, and where they begin behind the last first token
DRAWN_MS, SKIPPED_MS = 100.0, 400.0


def write_published() -> None:
    calibrations = [published.calibrate(own_bytes) for own_bytes in (True, False)]
    samples = [*cases.h200_cases(), *cases.wide_cases()]
    for calibration in calibrations:
        samples += [*cases.decode_cases(calibration), *cases.prefill_cases(calibration)]
    samples += [*cases.host_cases(calibrations[0]), *cases.partition_cases(calibrations[0])]
    worst = {
        arrangement: max(
            abs(error(sample)) for sample in samples if sample.get("arrangement") == arrangement and sample["own_bytes"]
        )
        for arrangement in ("merged", "stock")
    }
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
        [
            record.Claim(f"worst error of a rate with several users, {name}", round(value, 3), "", 0.15, "<=")
            for name, value in worst.items()
        ]
        + [
            record.Claim(
                f"worst error on two H200s at real widths, {rule}",
                round(max(abs(s["per_user"] / s["measured"] - 1) for s in samples if s.get("rule") == rule), 3),
                "",
                0.15,
                "<=",
            )
            for rule in ("spread", "measured")
        ],
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
        trace = workloads.decoding(serving, cost, cases.HOST, 7, tail=cases.TAIL)
        begin = results.window(trace)[0] + SKIPPED_MS
        rate = results.summary(trace)["per_user"]
        panels.append(Panel(f"7 users, {title}: {rate:.0f} tok/s each", trace, begin, begin + DRAWN_MS))
    PICTURE.write_text(draw(panels))


def write_compare(asked: argparse.Namespace) -> None:
    machine = machine_of(asked.stages)
    calibration = published.calibrate(True)
    cost = calibration.cost(machine)
    if asked.layers:
        if len(asked.layers) != asked.stages or sum(asked.layers) != sum(cost.layers):
            raise SystemExit(f"--layers {asked.layers}: {asked.stages} numbers that add up to {sum(cost.layers)}")
        cost = replace(cost, layers=asked.layers)
    host = replace(cases.HOST, host_ms=asked.host_ms, empty_ms=min(asked.host_ms, cases.HOST.empty_ms))
    samples = list(compare(cost, host, machine, asked.scheduler, asked.additional_config))
    for sample in samples:
        rate = ""
        if "per_user" in sample:
            rate = f"{sample['per_user']:5.1f} tok/s each, slowest {sample['slowest']:5.1f}"
        if "micro_batches" in sample:
            rate += f", {sample['micro_batches']:.1f} micro-batches a token"
        print(
            f"{sample['situation']:32} {sample['scheduler'].rsplit('.', 1)[-1]:20} "
            f"last first token {sample['last_first_token_s']:6.2f} s  {rate}"
        )
    if asked.out is not None:
        settings = {
            "command": "python -m benchmarks.pipeline_model " + shlex.join(sys.argv[1:]),
            "machine": machine.name,
            "calibration": asdict(calibration),
        }
        record.write(asked.out, settings, samples, [])


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_model", description=__doc__.splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("published", help=f"write {RECORD.name}")
    what.add_parser("timeline", help=f"write {PICTURE.name}")
    sides = what.add_parser("compare", help="scheduler classes side by side")
    sides.add_argument("--stages", type=int, default=6, help="3 or 6: which published machine (default: 6)")
    sides.add_argument("--scheduler", action="append", default=[], help="dotted name of a class, beside upstream's")
    sides.add_argument(
        "--additional-config", type=json.loads, default={}, help="vLLM's option of that name, for the classes named"
    )
    sides.add_argument("--layers", type=_layers, help="decoder layers of each stage, as 9,9,9,9,9,3 (default: even)")
    sides.add_argument(
        "--host-ms",
        type=float,
        default=cases.HOST.host_ms,
        help=f"host time of a micro-batch on a stage (default: {cases.HOST.host_ms})",
    )
    sides.add_argument("--out", type=Path, help="write a record there")
    asked = parser.parse_args()
    if asked.what == "published":
        write_published()
    elif asked.what == "timeline":
        write_timeline()
    else:
        write_compare(asked)


if __name__ == "__main__":
    main()
