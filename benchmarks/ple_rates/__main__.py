"""Decode and prefill with the n-gram table on the disk against the table pinned, under full graphs, piecewise and eager.

    python -m benchmarks.ple_rates run OUT --config CONFIG.JSON [--folder DIR] [--rows 40000000] [--only WORDS|WORDS]
        on a GPU, in one call of about eight minutes: 7 engines one after the other, raw results after each
    python -m benchmarks.ple_rates record OUT [--commit HASH]
        the committed record from these

DIR has to be on the disk that is to be measured; shards and flat file together take 26 GB for 40 million rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import numbers
from benchmarks.record import commit, hardware

from . import record
from .model import write

FULL = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
PIECEWISE = FULL | {"cudagraph_mode": "PIECEWISE"}
#: name -> (what of the table, graphs; None for eager)
CASES = {
    "shards, full graphs": ("shards", FULL),
    "flat file, full graphs": ("flat", FULL),
    "pinned, full graphs": ("pinned", FULL),
    "pinned by stock's allocation, full graphs": ("stock", FULL),
    "shards, piecewise graphs": ("shards", PIECEWISE),
    "shards, eager": ("shards", None),
    "pinned, eager": ("pinned", None),
}
#: Where memory cannot be pinned and graphs cannot be captured.
CPU_CASES = {
    "shards, eager": ("shards", None),
    "flat file, eager": ("flat", None),
    "in memory, eager": ("memory", None),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.ple_rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = top.add_subparsers(dest="what", required=True)
    again = what.add_parser("record")
    again.add_argument("out", type=Path)
    again.add_argument("--commit", help="what was measured, where the raw results do not say")
    again.add_argument("--name", default="", help="of a record beside the first")
    run_ = what.add_parser("run")
    run_.add_argument("out", type=Path)
    run_.add_argument("--config", type=Path, required=True, help="a config.json: its widths, without weights")
    run_.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    run_.add_argument("--layers", type=int, default=8)
    run_.add_argument("--experts", type=int, default=128)
    run_.add_argument("--rows", type=int, default=40_000_000)
    run_.add_argument("--contexts", type=numbers, default=[8192, 250_000])
    run_.add_argument("--users", type=numbers, default=[1, 4])
    run_.add_argument("--kv-gib", type=float, default=20.0)
    run_.add_argument("--only", default="", help="cases with these words in their name; or with others after a |")
    return top.parse_args(argv)


def engine_of(model: Path, flat: Path, place: str, graphs: dict | None, asked: argparse.Namespace) -> dict:
    """Arguments of `LLM`."""
    engram = {
        "shards": {"host_file_gather": True},
        "flat": {"host_file_path": str(flat)},
        "pinned": {"host_file_gather": False},
        "stock": {"host_file_gather": False},
        "memory": {"host_file_gather": False, "cpu_offload": False},
    }[place]
    made = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(asked.contexts) + 2048,
        "max_num_seqs": max(asked.users),
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": int(asked.kv_gib * 2**30),
        "enable_prefix_caching": False,
        "engram_config": engram,
        "additional_config": {"stage_times": True},
    }
    return made | ({"compilation_config": graphs} if graphs else {"enforce_eager": True})


def run(asked: argparse.Namespace) -> int:
    import torch

    gpu = torch.cuda.is_available()
    raw = {
        "hardware": hardware(),
        "commit": commit(),
        "gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if gpu else None,
        "settings": {
            key: value for key, value in vars(asked).items() if key in ("layers", "experts", "contexts", "users")
        },
        "samples": [],
    }
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        folder = Path(scratch)
        model, flat, raw["settings"]["table_rows"] = write(
            folder, asked.config, asked.layers, asked.experts, asked.rows
        )
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        for name, (place, graphs) in (CASES if gpu else CPU_CASES).items():
            if any(words in name for words in asked.only.split("|")):
                raw["samples"].append(
                    {"case": name} | one(folder, engine_of(model, flat, place, graphs, asked), place, size, asked)
                )
                # After every case: a run that is cut short has lost only the last one.
                asked.out.write_text(json.dumps(raw))
                print(
                    json.dumps({k: v for k, v in raw["samples"][-1].items() if k not in ("prefill", "decode")}),
                    flush=True,
                )
    return 1 if any("failed" in sample for sample in raw["samples"]) else 0


def one(folder: Path, engine: dict, place: str, table_bytes: int, asked: argparse.Namespace) -> dict:
    """A case's sample; `failed` in it where its process ended badly, so that the others are still measured."""
    files = [str(path) for path in sorted(Path(engine["model"]).glob("*.safetensors"))]
    job = {
        "engine": engine,
        "stock": place == "stock",
        "files": [*files, engine["engram_config"].get("host_file_path") or files[0]],
        "contexts": asked.contexts,
        "users": asked.users,
        "decode_context": min(asked.contexts),
    }
    (folder / "job.json").write_text(json.dumps(job))
    # One process, so that the kernel's count of what it read is the worker's.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.ple_rates.job", str(folder / "job.json"), str(folder / "result.json")]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-4000:]}
    found = json.loads((folder / "result.json").read_text())
    sizes = {"table_bytes": table_bytes} if place in ("pinned", "stock") else {}
    return found | sizes | {"wall_s": round(time.perf_counter() - began, 1)}


def main() -> int:
    asked = arguments()
    if asked.what == "record":
        record.write_record(asked.out, asked.commit, asked.name)
        return 0
    return run(asked)


if __name__ == "__main__":
    sys.exit(main())
