"""One variant: start its engine, ask it, write down what came."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.kv_rates.rates import WORDS, case, warm_up
from benchmarks.pipeline_rates import geometry
from benchmarks.pipeline_rates.rates import Users
from benchmarks.side_by_side import engine_arguments

from .link import bandwidth, traffic
from .variants import CARD_BYTES, VARIANTS, WEIGHT_BYTES, Variant

COUNTED = 64


def measure_variant(asked: argparse.Namespace) -> None:
    """Measure `asked.variants`, which names one, and write samples after each."""
    name = asked.variants
    variant = VARIANTS[name]
    samples: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        gpu = torch.cuda.is_available()
        if variant.card and gpu:
            torch.cuda.set_per_process_memory_fraction(CARD_BYTES / torch.cuda.mem_get_info()[1])
        if gpu and name == "host":
            samples += [{"variant": name} | sample for sample in bandwidth()]
        engine, settings = start(asked, variant, Path(scratch) / "model")
        ballast = hold_card(engine) if variant.card and gpu else None
        parts = decoding(engine, asked) if variant.decode else prompt(engine, variant, asked)
        for sample in parts:
            samples.append({"variant": name} | sample)
            gpus = torch.cuda.get_device_name(0) if gpu else None
            asked.out.write_text(json.dumps({"gpus": gpus, "settings": settings, "samples": samples}))
        del ballast


def start(asked: argparse.Namespace, variant: Variant, folder: Path):
    """The engine, and the settings that all variants share."""
    from vllm import LLM

    gpu = torch.cuda.is_available()
    shared = engine_arguments(max(asked.contexts), max(asked.users), asked.chunk, COUNTED, gpu)
    own = {"max_model_len": shared.pop("max_model_len")}
    if gpu and not variant.decode:
        # The model's own limit for the share; a prompt alone needs no room for others' answers.
        own["max_model_len"] = variant.prompt + 16
    own["kv_cache_memory_bytes"] = variant.kv_bytes if gpu else 64 << 20
    if asked.config:
        own["load_format"] = "dummy"
        model = str(geometry.write(folder, asked.config, asked.layers, asked.experts))
        shown = {"layers": asked.layers, "experts": asked.experts}
    else:
        model, shown = asked.model, {"model": Path(asked.model).name}
    engine = LLM(model, **(shared | own | variant.engine)).llm_engine
    return engine, shared | shown | {"contexts": asked.contexts, "users": asked.users}


def hold_card(engine) -> torch.Tensor:
    """Memory that stands for the weights that a card would hold and this model does not have."""
    (weights,) = engine.apply_model(gpu_bytes)
    return torch.empty(max(0, WEIGHT_BYTES - weights), dtype=torch.uint8, device="cuda")


def gpu_bytes(model: torch.nn.Module) -> int:
    """Of a model's weights, those on a GPU."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cuda")


def decoding(engine, asked: argparse.Namespace):
    """A sample for each context and number of users."""
    for context in asked.contexts:
        warm_up(engine, context)
        for users in asked.users:
            link: dict = {}
            first, found = case(engine, context, users, COUNTED, partial(traffic, link))
            sample = {"kind": "decode", "context": context, "users": users, "first_token_s": first}
            yield sample | found | link | peak()


def prompt(engine, variant: Variant, asked: argparse.Namespace):
    """Two prompts of the variant's length, one after the other: the first compiles."""
    length = variant.prompt if torch.cuda.is_available() else max(asked.contexts)
    for number in range(2):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        made, link = Users(engine, WORDS), {}
        began = time.perf_counter()
        with traffic(link):
            made.ask(1, length, 4)
            made.until(lambda made=made: made.tokens() >= 1)
        seconds = time.perf_counter() - began
        made.leave()
        yield (
            {
                "kind": "prompt",
                "number": number,
                "tokens": length,
                "seconds": round(seconds, 3),
                "arena_bytes": variant.engine["qsa_config"]["arena_bytes"],
            }
            | link
            | peak()
        )


def peak() -> dict:
    """Most memory of the device that was in use and that was reserved, MiB; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1),
        "peak_reserved_mib": round(torch.cuda.max_memory_reserved() / 2**20, 1),
    }
