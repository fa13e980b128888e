"""`python -m benchmarks.qsa_kernels --out FILE.json`: our attention kernels against upstream's, at real widths.

Each format, context and number of requests, decode (one row a request) and prefill (2048 rows in all): time inside a CUDA
graph, where caches hold what the call before read; the same with K/V in nobody's cache, which is how a layer finds them;
the bytes that have to move at the speed of a large copy in the same run, and the products at the speed of a large one.
A kernel that is wrong on this GPU, or whose rows depend on their neighbours, is reported and not timed.

    --sweep     tries the tiles of `tried.candidates` on fewer cases instead, and prints the fastest: for tiles.py
    --tiles 86  uses another GPU's tiles
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.gpu_time import bandwidth, cold_in_graph, in_graph, seconds
from benchmarks.qsa_kernels import check
from benchmarks.qsa_kernels.geometry import Geometry, published
from benchmarks.qsa_kernels.inputs import Paged, Queries, distinct, paged, queries
from benchmarks.qsa_kernels.tried import Kernel, candidates, compile_all, kernels
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, KVFormat
from vllm.models.qwen4_exp.qsa.tiles import INTERPRETED, TILES, Tile, tile_for

FORMATS = (BF16, INT8, FP8)
PREFILL_ROWS = 2048
#: Of a sweep: each format's in this order, and its first tile's rows checked against their neighbours.
SWEPT = (INT8, FP8, BF16)
SWEEP_SECONDS, SECONDS = 100.0, 420.0
CONTEXTS, SWEEP_CONTEXTS = (8_192, 65_536, 250_000), (65_536,)
#: Of upstream's bf16, the least speed that issue 5 wants.
AIMS = {("int8", False): 1.0, ("fp8", False): 1.0, ("int8", True): 0.95, ("fp8", True): 0.90}


@dataclass(frozen=True)
class Case:
    form: KVFormat
    context: int
    requests: int
    prefill: bool


def small() -> Geometry:
    """For a run on the CPU, whose times mean nothing."""
    return replace(published(), heads=4, dim=64, budget=32)


def cases(contexts: Sequence[int], requests: Sequence[int]) -> list[Case]:
    every = itertools.product(FORMATS, contexts, requests, (False, True))
    return [Case(form, context, count, prefill) for form, context, count, prefill in every]


def sweep_cases(contexts: Sequence[int]) -> list[Case]:
    """Prompts first, whose many rows make a check worth something; the number of requests changes nothing for them."""
    each = itertools.product(SWEPT, contexts, ((1, True), (1, False), (8, False)))
    return [Case(form, context, requests, prefill) for form, context, (requests, prefill) in each]


def product_rate(device: str) -> float | None:
    """Multiply-adds a second of a large bf16 product."""
    if device == "cpu":
        return None
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    return 8192**3 / seconds(lambda: a @ b, device)


def floors(shape: Geometry, case: Case, asked: Queries, tile: Tile, rates: tuple[float | None, float | None]) -> dict:
    """What a row has to move and to multiply, and how long that takes at best."""
    rows, columns = len(asked.q), int(asked.selected[:, -1].sum())
    moved = shape.kv_bytes(case.form, distinct(asked)) + rows * shape.row_bytes()
    if not case.prefill:
        moved += sum(shape.split_bytes(int(count), tile.split) for count in asked.selected[:, -1])
    products = shape.products(columns, shape.group)
    floor = {"bytes": moved, "products": products}
    if rates[0] and rates[1]:
        floor |= {"memory_microseconds": moved / rates[0] * 1e6, "product_microseconds": products / rates[1] * 1e6}
    return floor


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qsa_kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="docs/ampere-multigpu/benches/qsa-NAME.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--contexts", type=int, nargs="+", help=f"{CONTEXTS}, of a sweep {SWEEP_CONTEXTS}")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block-size", type=int, default=1568)
    parser.add_argument("--prefill-rows", type=int, default=PREFILL_ROWS)
    parser.add_argument("--tiles", type=int, choices=sorted({arch for arch, _ in TILES}), help="of another GPU")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--seconds", type=float,
        help=f"start no further case after this long; {SECONDS:.0f}, of a sweep {SWEEP_SECONDS:.0f}",
    )  # fmt: skip
    parser.add_argument("--commit", help="what was measured, where there is no git to ask")
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    device = "cuda:0" if on_gpu else "cpu"
    torch.manual_seed(0)
    shape = published() if on_gpu else small()
    rates = (bandwidth(device), product_rate(device))
    allowed = args.seconds or (SWEEP_SECONDS if args.sweep else SECONDS)
    end = time.monotonic() + allowed
    samples: list[dict] = []
    kept: tuple[tuple, Paged] | None = None
    asked: dict[tuple, Queries] = {}
    checked: set[str] = set()
    todo = (
        sweep_cases(args.contexts or SWEEP_CONTEXTS) if args.sweep else cases(args.contexts or CONTEXTS, args.requests)
    )
    for case in todo:
        wanted = (case.form, case.context, case.requests)
        if kept is None or kept[0] != wanted:
            kept = None  # before the next is made
            kept = (wanted, paged(shape, case.form, case.requests, case.context, args.block_size, device))
        rows = max(1, args.prefill_rows // case.requests) if case.prefill else 1
        key = (case.context, case.requests, rows)
        if key not in asked:
            asked[key] = queries(shape, case.requests, rows, case.context, device)
        tiles = candidates(case.form) if args.sweep else [tile_of(case.form, args.tiles, device)]
        if args.sweep and on_gpu and case.form.name not in checked:
            compile_all(tiles, kept[1], asked[key].part(slice(0, 8)))
        for kernel in kernels(case.form, device, tiles):
            named = {
                "format": case.form.name, "context": case.context, "requests": case.requests,
                "mode": "prefill" if case.prefill else "decode", "rows": len(asked[key].q), **kernel.named,
            }  # fmt: skip
            if time.monotonic() > end:
                samples.append(named | {"failed": f"not run: {allowed:.0f} s were over"})
                continue
            # In a sweep the first tile of each format stands for all, which are the same code.
            alone = kernel.tile is not None and not (args.sweep and case.form.name in checked)
            samples.append(named | sample(kernel, shape, case, kept[1], asked[key], tiles[0], alone, rates, device))
            if alone:
                checked.add(case.form.name)
            print(line(samples[-1]), flush=True)
    settings = {
        "command": "python -m benchmarks.qsa_kernels", "sweep": args.sweep, "tiles_of": args.tiles,
        "block_size": args.block_size, "copy_bytes_per_second": rates[0], "products_per_second": rates[1],
        "shape": shape.__dict__, "torch": torch.__version__,
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else None,
    }  # fmt: skip
    claims = [] if args.sweep else claimed(samples, on_gpu)
    gpus = f"1 x {torch.cuda.get_device_name(0)}" if on_gpu else None
    record.write(args.out, settings, samples, claims, gpus, measured=args.commit)
    for claim in claims:
        print(f"{'holds' if claim.holds else 'FAILS'}: {claim.name} {claim.value:.4g} {claim.compare} {claim.aim:g}")
    if args.sweep:
        print(*fastest(samples), sep="\n")
    return 0 if all(claim.holds for claim in claims) else 1


def tile_of(form: KVFormat, arch: int | None, device: str) -> Tile:
    if device == "cpu":
        return INTERPRETED
    return TILES[arch, form] if arch else tile_for(form, torch.device(device))


def sample(
    kernel: Kernel,
    shape: Geometry,
    case: Case,
    cache: Paged,
    asked: Queries,
    tile: Tile,
    alone: bool,
    rates,
    device: str,
) -> dict:
    """One row: right or not, the same bits or not if ``alone``, then microseconds beside the floors."""
    try:
        found = check.error(kernel.attention, cache, asked, case.prefill)
        if not check.right(found):
            return found | {"failed": f"error {found['error']:.2e}, floor {found['floor']:.2e}"}
        if alone:
            found["differing_rows"] = check.differing_rows(kernel.attention, cache, asked)
            if found["differing_rows"]:
                return found | {"failed": f"{found['differing_rows']} rows depend on their neighbours"}
        found |= times(lambda: kernel.attention(cache, asked, case.prefill), case.prefill, device)
    except Exception as problem:  # a tile that does not fit is a result
        return {"failed": f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"}
    return found | floors(shape, case, asked, kernel.tile or tile, rates)


def times(call: Callable[[], object], prefill: bool, device: str) -> dict:
    """Microseconds in a graph and with cold caches; on a CPU one call's, by the clock."""
    if device == "cpu":
        return {"microseconds": seconds(call, device) * 1e6}
    # A prompt's take milliseconds: few are enough.
    graph = in_graph(call, device, *((2, 5) if prefill else ()))
    cold = cold_in_graph(call, device)
    return {
        "microseconds": graph * 1e6,
        "cold_microseconds": statistics.median(cold) * 1e6,
        "cold_samples_microseconds": [round(one * 1e6, 2) for one in cold],
    }


def line(row: dict) -> str:
    head = f"{row['format']:5} {row['context']:7,} x {row['requests']} {row['mode']:7} {row['kernel']:8} {row.get('tile', '')}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    floor = f"memory {row['memory_microseconds']:.1f}" if "memory_microseconds" in row else f"{row['bytes']:,} bytes"
    cold = f" (cold {row['cold_microseconds']:.1f})" if "cold_microseconds" in row else ""
    return f"{head} {row['microseconds']:9.1f} us{cold}, {floor}, error {row['error'] / row['floor']:.2f} of the floor"


def claimed(samples: list[dict], timed: bool) -> list[record.Claim]:
    """Least speed of ours against upstream's bf16 in the same case if ``timed``, and whether results are right."""
    case = lambda row: (row["context"], row["requests"], row["mode"])  # noqa: E731
    times = {
        (row["kernel"], row["format"], *case(row)): row["microseconds"] for row in samples if "microseconds" in row
    }
    claims = []
    for (form, prefill), aim in AIMS.items():
        mode = "prefill" if prefill else "decode"
        ratios = [
            times["upstream", "bf16", *key[2:]] / took
            for key, took in times.items()
            if key[:2] == ("ours", form) and key[-1] == mode and ("upstream", "bf16", *key[2:]) in times
        ]
        if ratios and timed:
            name = f"{mode} of {form}, least speed against upstream's bf16"
            claims.append(record.Claim(name, min(ratios), "of bf16's", aim, ">="))
    failed = [row for row in samples if "failed" in row and not row["failed"].startswith("not run")]
    claims.append(record.Claim("cases in which a kernel was wrong", float(len(failed)), "cases", 0.0, "<="))
    unrun = [row for row in samples if row.get("failed", "").startswith("not run")]
    claims.append(record.Claim("cases that were not run", float(len(unrun)), "cases", 0.0, "<="))
    return claims


def fastest(samples: list[dict]) -> list[str]:
    """The best tiles of every format and mode, each by its worst case against that case's best."""
    best: dict[tuple, float] = {}
    slowdowns: dict[tuple, float] = {}
    timed = [row for row in samples if row["kernel"] == "ours" and "microseconds" in row]
    for row in timed:
        case = (row["format"], row["mode"], row["context"], row["requests"])
        best[case] = min(best.get(case, row["microseconds"]), row["microseconds"])
    for row in timed:
        case = (row["format"], row["mode"], row["context"], row["requests"])
        key = (*case[:2], row["tile"])
        slowdowns[key] = max(slowdowns.get(key, 1.0), row["microseconds"] / best[case])
    ranked = sorted(slowdowns.items(), key=lambda item: (*item[0][:2], item[1]))
    return [f"{form:5} {mode:7} {tile}: {worst:.2f} of the best, at worst" for (form, mode, tile), worst in ranked]


if __name__ == "__main__":
    sys.exit(main())
