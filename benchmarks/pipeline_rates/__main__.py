"""Decoding rates over stages: upstream's scheduler, ours, and the ideal pipeline.

python -m benchmarks.pipeline_rates run OUT --config CONFIG.JSON     real widths, random weights, on GPUs
python -m benchmarks.pipeline_rates run OUT --model CHECKPOINT       any checkpoint, on whatever there is
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.options import numbers
from benchmarks.record import hardware
from benchmarks.side_by_side import gpu_arguments

from . import geometry, record
from .rates import measure
from .switch import Rule


def arguments() -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_rates", description=__doc__.splitlines()[0])
    what = top.add_subparsers(dest="what", required=True)
    again = what.add_parser("record", help="make the committed record from raw results")
    again.add_argument("out", type=Path, help="raw results of a run")
    again.add_argument("--commit", help="what was measured, where it is not what lies here")
    again.add_argument("--name", default="", help="of a record beside the first")
    parser = what.add_parser("run", help="measure")
    parser.add_argument("out", type=Path, help="raw results, written after every case")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="a config.json: its widths, without weights")
    source.add_argument("--model", help="a checkpoint")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=48, help="with --config")
    parser.add_argument("--experts", type=int, default=512, help="with --config")
    parser.add_argument("--contexts", type=numbers, default=[8192, 65536])
    parser.add_argument("--users", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--rules", default="um128")
    parser.add_argument(
        "--additional-config", type=json.loads, default={}, help="vLLM's option of that name: switches to be off"
    )
    parser.add_argument("--kv-gib", type=float, default=20.0)
    return top.parse_args()


def build(asked: argparse.Namespace, folder: Path):
    """The engine, and the settings that it was built with."""
    from vllm import LLM
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    most = max(asked.users)
    settings = {
        "pipeline_parallel_size": asked.stages,
        "max_model_len": max(asked.contexts) + 2048,
        "max_num_seqs": most,
        "kv_cache_memory_bytes": int(asked.kv_gib * 2**30),
        "skip_tokenizer_init": True,
        "scheduler_cls": f"benchmarks.pipeline_rates.switch.{'Switched' if cpu else 'AsyncSwitched'}",
        "engram_config": {"host_file_gather": True},
        "additional_config": {"stage_times": True} | asked.additional_config,
    }
    if asked.config:
        settings["load_format"] = "dummy"
    if not cpu:
        settings |= {"max_num_batched_tokens": 2048} | gpu_arguments(most)
    model = str(geometry.write(folder, asked.config, asked.layers, asked.experts)) if asked.config else asked.model
    return LLM(model, **settings).llm_engine, settings


def gpus() -> str | None:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else None


def run(asked: argparse.Namespace) -> None:
    samples: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        rule = Rule(Path(scratch) / "rule")
        began = time.perf_counter()
        engine, settings = build(asked, Path(scratch) / "model")
        settings |= {"layers": asked.layers, "experts": asked.experts} if asked.config else {"model": asked.model}
        settings["start_s"] = round(time.perf_counter() - began, 1)
        for context in asked.contexts:
            # Compiles what such a prompt needs, so that the first case does not wait for it.
            list(measure(engine, rule, context, min(2, max(asked.users)), "u"))
            for users in asked.users:
                for sample in measure(engine, rule, context, users, asked.rules):
                    samples.append(sample)
                    shown = {key: value for key, value in sample.items() if key not in ("gaps_ms", "times")}
                    print(json.dumps(shown), flush=True)
                where = {"hardware": hardware(), "gpus": gpus()}
                # After every case: a run that is cut short has lost only the last one.
                asked.out.write_text(json.dumps(where | {"settings": settings, "samples": samples}))


def main() -> None:
    asked = arguments()
    if asked.what == "run":
        run(asked)
    else:
        record.write_record(asked.out, asked.commit, asked.name)


if __name__ == "__main__":
    main()
