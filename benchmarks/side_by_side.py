"""Engines that differ in a few arguments, each in a process of its own, one after the other on the same device.

What is decided when layers are built or memory is taken cannot be compared within one process.  Programs that compare
such engines share this: what they may be asked, what all engines get, and how a child is run.  Imports no vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import numbers

#: Tokens of each user before decoding counts.
SETTLE = 8
#: Characters of a failed child's log that are printed.
TAIL = 3000


def add_options(
    parser: argparse.ArgumentParser, *, layers: tuple[int, str], experts: tuple[int, str], contexts: list, users: list
) -> None:
    """Of the model and of the cases; for numbers that a config.json is cut to, defaults and the reasons for them."""
    parser.add_argument("out", type=Path, help="raw results, written after every variant")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="a config.json: its widths, without weights")
    source.add_argument("--model", help="a checkpoint")
    for name, (number, why) in (("layers", layers), ("experts", experts)):
        parser.add_argument(f"--{name}", type=int, default=number, help="with --config" + why)
    parser.add_argument("--contexts", type=numbers, default=contexts)
    parser.add_argument("--users", type=numbers, default=users)


def child(program: str, part: Path, variant: str, asked: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """The command that measures one variant.

    Args:
        program: module and its subcommand
        part: the child's raw results
        asked: options of `add_options`, and those of `more`
    """
    module, what = program.split()
    words = [sys.executable, "-m", module, what, str(part), "--variants", variant]
    words += ["--config", str(asked.config)] if asked.config else ["--model", asked.model]
    for name in ("layers", "experts", "contexts", "users", *more):
        given = getattr(asked, name)
        words += [f"--{name}", ",".join(map(str, given)) if isinstance(given, list) else str(given)]
    return words


def run_child(words: list[str], out: Path, variant: str, limit: float) -> tuple[dict[str, Any] | None, str | None]:
    """What a child wrote, if anything, and how it failed, if it did.

    Its raw results and its log lie beside `out` while it runs, and stay there if this process is ended meanwhile.  An
    engine that hangs must not take the others' time: it is ended after `limit` seconds.

    Args:
        words: of `child`, whose results go to `part_of(out, variant)`
    """
    part, log = part_of(out, variant), part_of(out, variant).with_suffix(".log")
    part.unlink(missing_ok=True)
    # The engine and its worker in the child's own process: memory of the device can be asked, and nothing outlives it.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    failed = None
    with log.open("wb") as file:
        try:
            subprocess.run(words, stdout=file, stderr=file, env=environment, timeout=limit, check=True)
        except subprocess.TimeoutExpired:
            failed = f"stopped after {limit:.0f} s"
        except subprocess.CalledProcessError as error:
            failed = f"status {error.returncode}"
    if failed:
        print(f"{variant}: {failed}\n{log.read_text(errors='replace')[-TAIL:]}", flush=True)
    found = json.loads(part.read_text()) if part.exists() else None
    for sample in (found or {}).get("samples", ()):
        print(json.dumps({key: value for key, value in sample.items() if key != "gaps_ms"}), flush=True)
    part.unlink(missing_ok=True)
    log.unlink()
    return found, failed


def part_of(out: Path, variant: str) -> Path:
    """Where a variant's raw results lie until they are in `out`."""
    return out.with_suffix(f".{variant.replace(' ', '-')}.json")


def tokens_to_ask(context: int, users: int, chunk: int, counted: int) -> int:
    """Tokens that a user asks for, so that the first is still decoding when the last has been counted.

    A user whose prompt was early gets a token with every chunk of the prompts behind it.
    """
    return SETTLE + counted + -(-users * context // chunk) + 16


def engine_arguments(longest: int, users: int, chunk: int, counted: int, gpu: bool) -> dict[str, Any]:
    """Arguments of `LLM` that all variants get.

    Args:
        longest: prompt, in tokens
        users: at once, at most
        chunk: tokens of prompts in a step
        counted: tokens that decoding is measured over
    """
    shared = {
        "max_num_batched_tokens": chunk,
        "max_model_len": longest + tokens_to_ask(longest, users, chunk, counted) + 64,
        "max_num_seqs": users,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "engram_config": {"host_file_gather": True},
        "additional_config": {"stage_times": True},
    }
    return shared | (gpu_arguments(users) if gpu else {})


def gpu_arguments(users: int) -> dict[str, Any]:
    """Full graphs of decode steps for so many users, and the attention that every card has."""
    return {
        "attention_config": {"flash_attn_version": 2},
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [size for size in (1, 2, 4, 8, 16) if size <= users],
        },
    }
