"""One variant: start its engine, ask it, write down what came."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import host_time
from benchmarks.kv_rates.rates import SETTLE, WORDS, start_users, tokens_to_ask
from benchmarks.pipeline_rates import geometry
from benchmarks.pipeline_rates.rates import Users, turn

from .link import bandwidth, traffic
from .variants import CARD_BYTES, VARIANTS, WEIGHT_BYTES, Variant

COUNTED = 64


def measure_variant(asked: argparse.Namespace) -> None:
    """Measure `asked.variants`, which names one, and write samples after each."""
    name = asked.variants
    variant = VARIANTS[name]
    # The engine and its worker in this process: memory of the device can be asked.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
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
            print(json.dumps({k: v for k, v in samples[-1].items() if k != "gaps_ms"}), flush=True)
            gpus = torch.cuda.get_device_name(0) if gpu else None
            asked.out.write_text(json.dumps({"gpus": gpus, "settings": settings, "samples": samples}))
        del ballast


def start(asked: argparse.Namespace, variant: Variant, folder: Path):
    """The engine, and the settings that all variants share."""
    from vllm import LLM

    gpu = torch.cuda.is_available()
    longest = max([*asked.contexts, variant.prompt if gpu else 0])
    # What the first of many users gets while the others' prompts are read.
    more = tokens_to_ask(longest, max(asked.users), asked.chunk, COUNTED) + 64
    shared = {
        "max_num_seqs": max(asked.users),
        "max_num_batched_tokens": asked.chunk,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "engram_config": {"host_file_gather": True},
        "additional_config": {"stage_times": True},
    }
    if gpu:
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= max(asked.users)]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        shared |= {"attention_config": {"flash_attn_version": 2}, "compilation_config": graphs}
    own = {"kv_cache_memory_bytes": variant.kv_bytes if gpu else 64 << 20, "max_model_len": longest + more}
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
        # Compiles what prompts of that length need.
        start_users(engine, context, 1, 2)[0].leave()
        for users in asked.users:
            made, first = start_users(engine, context, users, tokens_to_ask(context, users, asked.chunk, COUNTED))
            made.decode(SETTLE)
            link: dict = {}
            host_time.reset(engine)
            with traffic(link):
                found = turn(made, COUNTED)
            gpu = {"gpu_ms": host_time.decode_gpu_ms(host_time.collect(engine)).get("forward")}
            made.leave()
            sample = {"kind": "decode", "context": context, "users": users, "first_token_s": first}
            yield sample | gpu | found | link | peak()


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
