"""Command line of the fault measurements; see benchmarks/faults/__init__.py."""

import argparse
import json
from pathlib import Path

from benchmarks import record
from benchmarks.faults import front, limits, scene
from benchmarks.faults.cases import cases

OUT = record.FOLDER / "pipeline-faults.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="directory of a small checkpoint (python -m demo.checkpoint)")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--label", help="what the rows are a measurement of: before, after")
    parser.add_argument("--rows", type=Path, help="file that rows are appended to, one JSON object a line")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after a fault within which all must end")
    parser.add_argument("--only", default="", help="part of a case's name, e.g. SIGSTOP or decode-0; 'limits'")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the server under test")
    parser.add_argument("--record", type=Path, nargs="+", help="rows to write the committed record from")
    args = parser.parse_args()
    if args.record:
        return write_record(args.record)
    if not (args.checkpoint and args.label and args.rows):
        parser.error("a measurement needs --checkpoint, --label and --rows")
    env = dict(pair.split("=", 1) for pair in args.env)
    settings = {"label": args.label, "commit": record.commit(), "stages": args.stages, "env": env}
    for case in cases(args.stages):
        if args.only in case.name:
            keep(args.rows, settings | scene.play(case, args.checkpoint, args.stages, args.patience, env))
    if args.only in "limits":
        for row in limits.play(args.checkpoint, args.stages, env):
            keep(args.rows, settings | row)
    for row in front.play(args.checkpoint, args.stages, env, args.only):
        keep(args.rows, settings | row)
    return 0


def keep(path: Path, row: dict) -> None:
    print(json.dumps(row), flush=True)
    with path.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def write_record(paths: list[Path]) -> int:
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    settings = {"checkpoint": "random, 8 layers", "arguments": scene.ARGUMENTS, "stages": rows[0]["stages"]}
    after = [row for row in rows if row["label"] == "after"]
    held = claims([row for row in after if "fault" in row]) + limit_claims([row for row in after if "limit" in row])
    record.write(OUT, settings, rows, held)
    return 0


def claims(rows: list[dict]) -> list[record.Claim]:
    """What the page promises, of rows that were all measured with the default silence limit."""
    never = float("inf")
    ended = [row for row in rows if row["exit_status"] == 1]
    left = [row for row in rows if _left(row)]

    def slowest(hung: bool) -> float:
        asked = [row for row in rows if row["client"] != "no request" and (row["fault"] == "SIGSTOP") == hung]
        return max((row["client_s"] if row["client_s"] is not None else never for row in asked), default=0.0)

    return [
        record.Claim("client hears of a death or a failure", slowest(hung=False), "s", 10.0, "<="),
        record.Claim("client hears of a hang", slowest(hung=True), "s", 30.0, "<="),
        record.Claim("servers that end with status 1", len(ended), "cases", len(rows), ">="),
        record.Claim("cases that leave something", len(left), "cases", 0, "<="),
    ]


def _left(row: dict) -> bool:
    return bool(row["left_processes"] or row["left_shared_memory"] or row["left_port"])


def limit_claims(rows: list[dict]) -> list[record.Claim]:
    """What the page promises of overload and of the processes in front of the engine."""
    late = [row["ends"].get("error", 0) for row in rows if "ends" in row]
    lost = [row["tokens_asked"] - row["tokens"] for row in rows if "stopped_s" in row]
    gone = [float("inf") if row["gone_s"] is None or _left(row) else row["gone_s"] for row in rows if "gone_s" in row]
    known = [
        (late, "refusals of overload inside a response", "requests", 0),
        (lost, "tokens lost to a server that was stopped for a while", "tokens", 0),
        (gone, "all is gone after a process in front of the engine was killed", "s", 15.0),
    ]
    return [record.Claim(name, max(values), unit, aim, "<=") for values, name, unit, aim in known if values]


if __name__ == "__main__":
    raise SystemExit(main())
