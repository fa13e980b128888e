# SPDX-License-Identifier: Apache-2.0
"""Say what a checkpoint holds, which stages it lands on, and what is wrong with it.

Reads headers and JSON files only, and a few rows where a flat file of the n-gram table is named. Exit status: 0 for
"ok" and "warnings", 1 for "refused" (or nothing there to look at), 2 for a wrong command line. With --repair the status
is that of the repaired checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from vllm.ampere.checkpoint import Checkpoint, read
from vllm.ampere.finding import Finding
from vllm.ampere.findings import findings
from vllm.ampere.findings.stored_table import with_flat_file
from vllm.ampere.repair import Repair, RepairError, repair
from vllm.ampere.report import summary, text, verdict
from vllm.ampere.report.style import paint
from vllm.ampere.report.summary import REFUSED, STATUS, as_json
from vllm.ampere.sampling import SAMPLING_KEYS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, or a hub id that is downloaded already")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=int,
        metavar="N",
        help="also say what each of N stages would hold",
    )
    parser.add_argument(
        "--partition",
        metavar="COUNTS",
        help="layers of each stage, as in 17,16,15 (default: VLLM_PP_LAYER_PARTITION, else even)",
    )
    parser.add_argument(
        "--engram-config",
        metavar="JSON",
        help="as the server has it: a host_file_path in it (or VLLM_PLE_MMAP_PATH) is checked in place of the n-gram "
        "table's shards",
    )
    parser.add_argument(
        "--repair",
        type=Path,
        metavar="OUT",
        help="write corrected JSON files beside links to the same weights into OUT, a new or empty directory",
    )
    parser.add_argument(
        "--sampling",
        metavar="JSON",
        help="with --repair: sampling parameters for a generation config without any, as the model's card gives them",
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status; everything printed goes to stdout, errors of a single sentence to stderr."""
    try:
        return _run(args)
    except Finding as finding:
        if args.json:
            print(json.dumps({"checkpoint": args.checkpoint, "verdict": REFUSED, "findings": [as_json(finding)]}))
        else:
            print(f"vllm ampere check: {finding}", file=sys.stderr)
        return STATUS[REFUSED]
    except BrokenPipeError:
        # `| head` has read enough; without a stdout the interpreter would complain once more at exit.
        sys.stdout = None
        return STATUS[REFUSED]


def _run(args: argparse.Namespace) -> int:
    size, sampling, flat = _pipeline_size(args), _sampling(args), _flat_file(args)

    def look(checkpoint: Checkpoint):
        found = findings(checkpoint)
        return with_flat_file(checkpoint, found, flat) if flat else (found, None)

    checkpoint = read(args.checkpoint)
    if flat and not checkpoint.text.ple_layer_ids:
        _usage(f"host_file_path={str(flat)!r} is a file of the n-gram table, and this model has none (ple_layer_ids)")
    found, table = look(checkpoint)
    try:
        made = summary(checkpoint, found, pipeline_size=size, partition=args.partition, flat=table)
        repaired = repair(checkpoint, found, args.repair, sampling, lambda out: look(out)[0]) if args.repair else None
    except (RepairError, ValueError) as error:
        # Stages that cannot be say so themselves, with a partition that would work.
        print(f"vllm ampere check: {error}", file=sys.stderr)
        return 2
    made["repair"] = _repair(repaired) if repaired else None
    print(json.dumps(made) if args.json else text(made, paint(sys.stdout)), flush=True)
    return STATUS[made["repair"]["verdict"] if repaired else made["verdict"]]


def _pipeline_size(args: argparse.Namespace) -> int:
    """Stages to describe; a partition alone says how many there are."""
    if args.pipeline_parallel_size is None:
        return len(args.partition.split(",")) if args.partition else 0
    if args.pipeline_parallel_size < 1:
        _usage(f"--pipeline-parallel-size {args.pipeline_parallel_size}: expected at least 1")
    return args.pipeline_parallel_size


def _sampling(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.sampling is None:
        return None
    if args.repair is None:
        _usage("--sampling goes with --repair")
    try:
        values = json.loads(args.sampling)
    except ValueError as error:
        _usage(f"--sampling {args.sampling}: {error}")
    if not isinstance(values, dict) or not values or not values.keys() <= set(SAMPLING_KEYS):
        _usage(f"--sampling {args.sampling}: expected an object with some of {', '.join(SAMPLING_KEYS)}")
    return values


def _flat_file(args: argparse.Namespace) -> Path | None:
    """The flat file of the n-gram table that a server with these settings would read; None without any."""
    # On use, as all of the engine. Where no file is named its configuration, two seconds, is not imported.
    from vllm import envs

    if args.engram_config is None and not envs.VLLM_PLE_MMAP_PATH:
        return None
    from pydantic import ValidationError

    from vllm.config import EngramConfig
    from vllm.models.qwen4_exp.ple_store.errors import HostFileGatherRefused
    from vllm.models.qwen4_exp.ple_store.settings import flat_file

    try:
        engram = EngramConfig(**json.loads(args.engram_config or "{}"))
        return flat_file(engram)
    except HostFileGatherRefused as refused:
        _usage(str(refused))
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        _usage(f"--engram-config {args.engram_config}: {said}")
    except (ValueError, TypeError) as error:
        _usage(f"--engram-config {args.engram_config}: {error}")


def _usage(sentence: str) -> NoReturn:
    print(f"vllm ampere check: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _repair(done: Repair) -> dict[str, Any]:
    return {
        "out": str(done.out),
        "changes": [{"file": file, "change": what} for file, what in done.changes],
        "linked": done.linked,
        "verdict": verdict(done.remaining),
        "remaining": [as_json(finding) for finding in done.remaining],
    }
