"""`python -m benchmarks.qsa_write_select --out FILE.json`: every case, ours and upstream's."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.gpu_time import bandwidth
from benchmarks.qsa_write_select import guard, selection, writers

PARTS = ("select", "write", "guard")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qsa_write_select", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="docs/ampere-multigpu/benches/qsa-write-select-NAME.json"
    )
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: interpreted, times mean nothing"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; all of it")
    parser.add_argument("--try", dest="tries", action="store_true", help="also settings that are not in use")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 65536, 250_000])
    parser.add_argument("--longest", type=int, default=262_144, help="context that block tables have room for")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt's step")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 256, 2048], help="of the writer")
    parser.add_argument(
        "--keys", nargs="+", choices=selection.KEYS, default=list(selection.KEYS), help="index keys to select by"
    )
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--page", type=int, default=392, help="compressed keys in a block")
    parser.add_argument("--narrow", action="store_true", help="small heads, for a run on a CPU")
    parser.add_argument("--seconds", type=float, default=420, help="start no further case after this long")
    parser.add_argument("--commit", help="what was measured, where there is no git to ask")
    args = parser.parse_args(argv)
    device = "cuda:0" if args.device == "cuda" else "cpu"
    torch.manual_seed(0)
    rate = bandwidth(device)
    capability = torch.cuda.get_device_capability() if args.device == "cuda" else (0, 0)
    widths = writers.Widths(q_heads=2, head_dim=128, block=16) if args.narrow else writers.Widths()
    sizes = (args.contexts, args.users, args.chunk, args.longest, args.budget, args.page)
    cases = {
        "select": selection.measure(*sizes, device, rate, args.tries, args.keys),
        "write": writers.measure(args.tokens, widths, device, rate, capability >= (8, 9)),
        "guard": guard.measure(args.users, args.vocabulary, device, rate),
    }
    samples: list[dict] = []
    end = time.monotonic() + args.seconds
    for part in args.parts:
        for row in cases[part]:
            samples.append(row)
            print(line(row), flush=True)
            if time.monotonic() > end:
                print(f"stopped: {args.seconds:.0f} s are over")
                break
    settings = {
        "command": "python -m benchmarks.qsa_write_select",
        **{key: value for key, value in vars(args).items() if key not in ("out", "commit")},
        "capability": ".".join(map(str, capability)),
        "copy_bytes_per_second": rate,
        "workspace_bytes": selection.workspace_bytes(device),
        "torch": torch.__version__,
    }
    gpus = f"1 x {torch.cuda.get_device_name(0)}" if args.device == "cuda" else None
    claims = claimed(samples)
    record.write(args.out, settings, samples, claims, gpus, measured=args.commit)
    for claim in claims:
        print(f"{claim.name}: {claim.value:.4g} {claim.unit}, aim {claim.compare} {claim.aim}")
    return 0 if all(claim.holds for claim in claims if claim.unit == "rows") else 1


def claimed(samples: list[dict]) -> list[record.Claim]:
    """Exactness and repeatability always; speed where upstream was measured beside."""
    counted = ("rows_not_exact", "rows_that_change_in_repeats", "rows_that_differ_as_decode")
    claims = [
        record.Claim(name.replace("_", " "), float(sum(row.get(name, 0) for row in samples)), "rows", 0.0, "<=")
        for name in counted
    ]
    field = "graph_microseconds"
    pairs = {}
    for row in samples:
        key = tuple(row.get(k) for k in ("part", "context", "requests", "rows", "tokens", "keys"))
        if row["part"] in ("select", "guard") and field in row:
            pairs.setdefault(key, {})[row["what"]] = row[field]
        if row["part"] == "write" and row["format"] == "bf16" and row["what"] == "upstream" and field in row:
            pairs.setdefault(key, {})["upstream"] = row[field]
        if row["part"] == "write" and row["format"] == "int8" and row["what"] == "both parts" and field in row:
            pairs.setdefault(key, {})["ours"] = row[field]
    for (part, context, requests, rows, tokens, keys), times in pairs.items():
        if {"upstream", "ours"} <= times.keys():
            where = {
                "select": f"{requests} x {rows} rows at {context}{', keys in fp8' if keys == 'fp8' else ''}",
                "write": f"{tokens} tokens, int8 over bf16",
                "guard": f"{rows} rows",
            }[part]
            claims.append(
                record.Claim(f"{part}, {where}", times["ours"] / times["upstream"], "times upstream's", 1.0, "<=")
            )
    return claims


def line(row: dict) -> str:
    where = " ".join(str(row[key]) for key in ("context", "requests", "rows", "keys", "tokens", "format") if key in row)
    figures = {k: v for k, v in row.items() if "rows_" in k or k.endswith("differ") or "difference" in k}
    times = " ".join(
        f"{key.removesuffix('microseconds')}{row[key]:.1f} us"
        for key in ("microseconds", "graph_microseconds", "floor_microseconds")
        if key in row
    )
    return f"{row['part']:7} {where:24} {row['what']:22} {times} {figures or ''}"


if __name__ == "__main__":
    sys.exit(main())
