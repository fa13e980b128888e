"""Command line of the measurements over Ray; see benchmarks/ray_stages/__init__.py."""

import argparse
import json
from pathlib import Path

from benchmarks import record
from benchmarks.ray_stages import faults

OUT = record.FOLDER / "pipeline-ray.json"
PATIENCE = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_stages", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="directory of a small checkpoint (python -m demo.checkpoint)")
    parser.add_argument("--label", default="now", help="what the rows are a measurement of: before, now")
    parser.add_argument("--rows", type=Path, help="file that rows are appended to, one JSON object a line")
    parser.add_argument("--only", help="name of the one case to measure")
    parser.add_argument("--record", type=Path, help="rows to write the committed record from")
    args = parser.parse_args()
    if args.record:
        return write_record(args.record)
    if not (args.checkpoint and args.rows):
        parser.error("a measurement needs --checkpoint and --rows")
    for case in faults.CASES:
        if args.only in (None, case.name):
            row = {"label": args.label, "commit": record.commit()} | faults.play(case, args.checkpoint, PATIENCE)
            print(json.dumps(row), flush=True)
            with args.rows.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
    return 0


def write_record(path: Path) -> int:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    # A case that was repaired was measured again, and both runs are kept.
    latest = {row["case"]: row for row in rows if row["label"] == "now"}
    settings = {
        "checkpoint": "random, 8 layers",
        "stages": 2,
        "nodes": "two Ray nodes of one machine, a stage on each",
        "commits": "hashes after the branch was moved onto other topics' work; what they change is what was measured",
        "arguments": [*faults.ENGINE, "--distributed-executor-backend", "ray"],
    }
    record.write(OUT, settings, rows, claims(list(latest.values())))
    return 0


def claims(rows: list[dict]) -> list[record.Claim]:
    """What the page promises."""
    never = float("inf")

    def slowest(*cases: str) -> float:
        chosen = [row["client_s"] for row in rows if row["case"] in cases]
        return max((never if seconds is None else seconds for seconds in chosen), default=never)

    left = [row for row in rows if row["left_processes"] or row["left_shared_memory"]]
    dead = ("stage-killed", "raylet-killed", "machine-killed", "engine-killed")
    return [
        record.Claim("client hears of a death", slowest(*dead), "s", 10.0, "<="),
        record.Claim("client hears of a hung stage", slowest("stage-stopped"), "s", 30.0, "<="),
        record.Claim("client hears of a silent machine", slowest("machine-silent"), "s", 90.0, "<="),
        record.Claim("the same with prompt checks", slowest("machine-silent-prompt"), "s", 30.0, "<="),
        record.Claim(
            "servers that end with status 1", sum(r["exit_status"] == 1 for r in rows), "cases", len(rows), ">="
        ),
        record.Claim("cases that leave something", len(left), "cases", 0, "<="),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
