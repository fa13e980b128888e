"""`python -m benchmarks.format_kernels --out FILE.json`: measure every case with every kernel that takes it.

--join A.json B.json    instead, one record of several that were measured on one card, with `--only` or `--backends`
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.format_kernels.cases import Case, Geometry, cases
from benchmarks.format_kernels.layers import build
from benchmarks.format_kernels.measure import sample
from benchmarks.gpu_time import bandwidth

#: What the card takes by itself, and the two that take packed integers on sm_80 and sm_86.
BACKENDS = ("auto", "marlin", "humming")
#: A bfloat16 result is within 2^-9 of the exact one, 0.0011 in the norm; four-bit scales of gptqmodel lose as much
#: again when float16 becomes bfloat16; experts round twice more on their way.
RELATIVE_LIMIT = 0.01


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.format_kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="docs/ampere-multigpu/benches/formats-NAME.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--narrow", type=int, default=1, help="divide the widths, for a run on a CPU")
    parser.add_argument("--only", default="", help="cases with this in their module's or format's name")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=420, help="start no further layer after this long")
    parser.add_argument("--commit", help="what was measured, where there is no git to ask")
    parser.add_argument("--join", nargs="+", help="records of parts, the one to believe first")
    args = parser.parse_args(argv)
    if args.join:
        return join(args.join, args.out)
    device = "cuda:0" if args.device == "cuda" else "cpu"
    geometry = Geometry(args.narrow)
    wanted = [case for case in cases(geometry) if args.only in f"{case.module} {case.format}"]
    backends = args.backends.split(",") if args.device == "cuda" else ["auto"]
    end = time.monotonic() + args.seconds
    samples: list[dict] = []
    seen: dict[Case, set[str]] = {case: set() for case in wanted}
    with world(device) as vllm_config:
        rate = bandwidth(device)
        # What an engine takes comes first, for every case: a run that is cut short has lost comparisons only.
        for backend, case in itertools.product(backends, wanted):
            if time.monotonic() > end:
                rows = [named(case, backend) | {"error": f"not run: {args.seconds:.0f} s were over"}]
            else:
                rows = measure(case, geometry, device, backend, rate, vllm_config, seen[case])
            samples += rows
            for row in rows:
                print(line(row), flush=True)
    claims = claims_of(samples)
    settings = {
        "command": "python -m benchmarks.format_kernels",
        "narrow": args.narrow,
        "backends": backends,
        "capability": capability(device),
        "copy_bytes_per_second": rate,
        "torch": torch.__version__,
    }
    gpus = f"1 x {torch.cuda.get_device_name(0)}" if args.device == "cuda" else None
    record.write(args.out, settings, samples, claims, gpus, measured=args.commit)
    return ended(args.out, samples, claims)


def claims_of(samples: list[dict]) -> list[record.Claim]:
    relative = max((row["relative"] for row in samples if "relative" in row), default=float("nan"))
    return [
        record.Claim("largest relative error", relative, "of the result's norm", RELATIVE_LIMIT, "<="),
        record.Claim("cases that no kernel took", float(len(unserved(samples))), "cases", 0.0, "<="),
    ]


def ended(out: Path, samples: list[dict], claims: list[record.Claim]) -> int:
    failed = [row for row in samples if "error" in row]
    print(f"{out}: {len(samples)} rows, {len(failed)} of them errors; largest relative error {claims[0].value:.5f}")
    return 0 if all(claim.holds for claim in claims) else 1


def join(parts: list[str], out: Path) -> int:
    """Rows of all parts, each case, backend and kernel from the first part that measured it.

    Raises SystemExit: the parts are of different cards or bases.
    """
    found = []
    for part in parts:
        path, _, backend = part.partition(":")
        found.append(record.read(Path(path)))
        if backend:
            found[-1]["samples"] = [row for row in found[-1]["samples"] if row["backend"] == backend]
    for key in ("upstream", "hardware"):
        kinds = {str(part[key] if key == "upstream" else part[key].get("gpus")) for part in found}
        if len(kinds) > 1:
            raise SystemExit(f"--join: parts of different {key}: {', '.join(sorted(kinds))}")
    rows: dict[tuple, dict] = {}
    for part in found:
        for row in part["samples"]:
            where = (row["module"], row["format"], row["backend"])
            rows.setdefault((*where, row.get("tokens")), row | {"commit": part["commit"]})
    measured = {key[:3] for key, row in rows.items() if "relative" in row}
    samples = [row for key, row in rows.items() if "relative" in row or key[:3] not in measured]
    settings = found[0]["settings"] | {"parts": [part["settings"] | {"commit": part["commit"]} for part in found]}
    beside = sorted({part["hardware"].get("beside", "nothing") for part in found})
    where = found[0]["hardware"] | {"beside": "; ".join(beside)}
    claims = claims_of(samples)
    record.write(out, settings, samples, claims, elsewhere=where, measured=found[0]["commit"])
    return ended(out, samples, claims)


def named(case: Case, backend: str) -> dict:
    return {
        "module": case.module,
        "format": case.format,
        "inputs": case.inputs,
        "outputs": case.outputs,
        "backend": backend,
    }


def measure(
    case: Case, geometry: Geometry, device: str, backend: str, rate: float | None, vllm_config, seen: set[str]
) -> list[dict]:
    """Rows of one case with one backend; none where it is the kernel that another backend has already been."""
    row = named(case, backend)
    vllm_config.kernel_config.linear_backend = backend
    vllm_config.kernel_config.moe_backend = backend
    built = None
    try:
        with torch.device(device):
            built = build(case, geometry, device, seen)
        if built is None:
            return []
        seen.add(built.kernel)
        row["kernel"] = built.kernel
        return [row | sample(built, tokens, device, rate) for tokens in case.tokens]
    except Exception as error:  # a case that a card cannot run is a row of the table, not the end of it
        traceback.print_exc(limit=-3)
        return [row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}]
    finally:
        built = None
        vllm_config.compilation_config.static_forward_context.clear()
        vllm_config.compilation_config.static_all_moe_layers.clear()
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def unserved(samples: list[dict]) -> set[tuple[str, str]]:
    """Cases without a single measured row."""
    every = {(row["module"], row["format"]) for row in samples}
    return every - {(row["module"], row["format"]) for row in samples if "relative" in row}


@contextmanager
def world(device: str) -> Iterator:
    """What an engine has set up before it builds layers: a world of one, its config, scratch memory, bfloat16."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.workspace import init_workspace_manager

    vllm_config = VllmConfig()
    torch.set_default_dtype(torch.bfloat16)
    # The reference is a float32 product; TF32 would round its factors to ten bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        backend = "gloo" if device == "cpu" else "nccl"
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend)
        parallel_state.initialize_model_parallel()
        init_workspace_manager(torch.device(device))
        try:
            with set_forward_context(None, vllm_config):
                yield vllm_config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            torch.set_default_dtype(torch.float32)


def capability(device: str) -> str:
    """The compute capability that vLLM chooses kernels by."""
    from vllm.platforms import current_platform

    return "cpu" if device == "cpu" else str(current_platform.get_device_capability())


def line(row: dict) -> str:
    head = f"{row['format']:28} {row['module']:24} {row['backend']:8}"
    if "error" in row:
        return f"{head} {row['error']}"
    times = f"{row['microseconds']:9.1f} us"
    if "floor_microseconds" in row:
        times += f" of {row['floor_microseconds']:8.1f}"
    return f"{head} {row['kernel']:28} {row['tokens']:5} tokens {times}  relative error {row['relative']:.5f}"


if __name__ == "__main__":
    sys.exit(main())
