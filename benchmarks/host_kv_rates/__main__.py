"""Rates with K/V in host memory beside K/V on the GPU, in one run.

python -m benchmarks.host_kv_rates run OUT --config CONFIG.json    real widths, random weights, on one GPU
python -m benchmarks.host_kv_rates run OUT --model CHECKPOINT      any checkpoint, on whatever there is
python -m benchmarks.host_kv_rates record OUT                      the committed record, from raw results

Each variant is an engine in a process of its own, one after the other on the same device, with the same prompts:

    vram, host         bf16, the pair that the claims compare
    vram-int8, host-int8
    arena-24 …         host, with an arena of so many MiB, one long prompt: peak memory against the arena
    share              host, in what a 24 GB card with 21.7 GiB of weights leaves: one prompt of the full length

A GPU needs `--variants` in parts where a call may take ten minutes; results of an earlier part are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.record import hardware
from benchmarks.side_by_side import add_options, child, part_of, run_child

from . import record
from .variants import VARIANTS


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="python -m benchmarks.host_kv_rates", description=__doc__.splitlines()[0])
    what = top.add_subparsers(dest="what", required=True)
    again = what.add_parser("record", help="make the committed record from raw results")
    again.add_argument("out", type=Path)
    again.add_argument("parts", type=Path, nargs="*", help="OUT.VARIANT.json, left by a run that was cut short")
    again.add_argument("--commit", help="what was measured, where it is not what lies here")
    again.add_argument("--name", default="", help="of a run that adds cases: a record beside the first")
    for name, text in (("run", "measure"), ("child", "one variant, in this process")):
        parser = what.add_parser(name, help=text)
        add_options(
            parser,
            layers=(16, ": one of three stages"),
            experts=(96, ": what leaves room for K/V beside"),
            contexts=[4096, 65_536, 250_000],
            users=[1, 4, 8],
        )
        parser.add_argument("--chunk", type=int, default=2048)
        parser.add_argument("--variants", default="vram,host")
        parser.add_argument("--limit", type=float, default=580.0, help="seconds of one variant")
    return top.parse_args(words)


def run(asked: argparse.Namespace) -> None:
    """Each variant in a child; one that fails is noted and the others go on."""
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {"samples": [], "settings": {}}
    for variant in asked.variants.split(","):
        if variant not in VARIANTS:
            raise SystemExit(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
        words = child("benchmarks.host_kv_rates child", part_of(asked.out, variant), variant, asked, ("chunk",))
        left, failed = run_child(words, asked.out, variant, asked.limit)
        got = left or {"samples": []}
        found["samples"] = [s for s in found["samples"] if s["variant"] != variant]
        found["samples"] += got["samples"] or [{"variant": variant, "kind": "failed", "status": failed or "no samples"}]
        found["settings"] |= got.get("settings", {})
        found |= {"hardware": hardware(), "gpus": got.get("gpus", found.get("gpus"))}
        asked.out.write_text(json.dumps(found))


def main() -> None:
    asked = arguments()
    if asked.what == "record":
        record.write_record(asked.out, asked.commit, asked.parts, asked.name)
    elif asked.what == "run":
        run(asked)
    else:
        from .measure import measure_variant

        measure_variant(asked)


if __name__ == "__main__":
    main()
