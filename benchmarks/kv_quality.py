"""What K/V in one byte costs in quality: divergence from bf16 K/V on a small model, the floor beside it.

    python -m benchmarks.kv_quality      writes qsa-quality-cpu.json, five minutes on two cores

A small random checkpoint answers the same prompts with each format; every position's whole distribution is compared
with that of bf16 K/V by Kullback-Leibler divergence, in nats.  Two floors: the same engine with bf16 K/V and another
division of the prompts into chunks and batches, which is what rounding alone does, and transformers' model in float32
against itself in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.kv_pages import FLOOR, QUALITY, quality
from demo import reference
from demo.checkpoint.geometry import geometry
from demo.checkpoint.tokens import SPECIAL
from demo.checkpoint.write import build

#: Twelve layers, three of them sparse: two of a token's three reads of K/V come after one that was rounded.
SHAPE = {"num_hidden_layers": 12}
#: Long for this model's budget of 64 tokens, so that nearly all positions choose what they read.
PROMPTS, LENGTH = 8, 512
CHUNK = 128
INDEX_KEYS = {"indexer_kv_dtype": "fp8"}
#: name in the table -> what differs from bf16 K/V, chunks of CHUNK tokens and one request at a time
RUNS = {
    "bf16": {},
    FLOOR: {"max_num_batched_tokens": 96, "together": True},
    "int8_per_token_head": {"kv_cache_dtype": "int8_per_token_head"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "bf16, index keys in fp8": {"attention_config": INDEX_KEYS},
    "int8, index keys in fp8": {"kv_cache_dtype": "int8_per_token_head", "attention_config": INDEX_KEYS},
    "fp8, index keys in fp8": {"kv_cache_dtype": "fp8", "attention_config": INDEX_KEYS},
    "fp8, first sparse layer in bf16": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["3"]},
}
BASE = next(iter(RUNS))
TRANSFORMERS = "transformers, float32 against bfloat16"
#: Mean divergence that a format may have, in floors: no more than another division into batches makes.
AIMS = {"int8_per_token_head": 1.0, "fp8": 1.0}


def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(len(SPECIAL), 500) for _ in range(LENGTH)] for _ in range(PROMPTS)]


def answer(model: str, run: str, out: str) -> None:
    """The program of one engine: log-probabilities `[prompts, LENGTH - 1, vocabulary]` into a file."""
    from vllm import LLM, SamplingParams

    engine = dict(RUNS[run])
    together = engine.pop("together", False)
    settings = {"max_model_len": LENGTH + 8, "max_num_seqs": 4, "max_num_batched_tokens": CHUNK} | engine
    llm = LLM(model, max_logprobs=-1, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, **settings)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    batches = [asked] if together else [[one] for one in asked]
    found = []
    for output in (output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)):
        flat = output.prompt_logprobs
        vocabulary = llm.model_config.get_vocab_size()
        logprobs = torch.empty(LENGTH - 1, vocabulary)
        # The first position has none; the others list the prompt's own token first and then all by rank.
        for position in range(1, LENGTH):
            span = slice(flat.start_indices[position], flat.end_indices[position])
            logprobs[position - 1, flat.token_ids[span]] = torch.tensor(flat.logprobs[span])
        found.append(logprobs)
    torch.save(torch.stack(found), out)


def engine_run(model: Path, run: str, folder: Path) -> torch.Tensor:
    out, log = folder / f"{list(RUNS).index(run)}.pt", folder / "log.txt"
    command = [sys.executable, "-m", "benchmarks.kv_quality", "--answer", str(model), run, str(out)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise SystemExit(f"{run}: status {done.returncode}\n{log.read_text()[-4000:]}")
    return torch.load(out)


@torch.inference_mode()
def transformers_run(model: Path, dtype: torch.dtype) -> torch.Tensor:
    loaded = reference.load(model, dtype)
    logits = [loaded(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1] for prompt in prompts()]
    return torch.stack(logits).float().log_softmax(-1)


def divergence(base: torch.Tensor, other: torch.Tensor) -> dict:
    """Of two sets of log-probabilities `[..., vocabulary]`, position by position."""
    each = (base.exp() * (base - other)).sum(-1).flatten().clamp(min=0)
    same = (base.argmax(-1) == other.argmax(-1)).float().mean()
    return {
        "positions": each.numel(),
        "mean": float(each.mean()),
        "median": float(each.median()),
        "p99": float(each.quantile(0.99)),
        "largest": float(each.max()),
        "same_choice": float(same),
    }


def measure(folder: Path) -> list[dict]:
    model = folder / "checkpoint"
    build(model, geometry("tiny", **SHAPE))
    base = engine_run(model, BASE, folder)
    samples = []
    for run in list(RUNS)[1:]:
        samples.append({"run": run} | divergence(base, engine_run(model, run, folder)))
        print(json.dumps(samples[-1]), flush=True)
    half, full = (transformers_run(model, dtype) for dtype in (torch.bfloat16, torch.float32))
    samples.append({"run": TRANSFORMERS} | divergence(half, full))
    samples.append({"run": "transformers in bfloat16 against bf16 K/V"} | divergence(base, half))
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_quality", description=__doc__.splitlines()[0])
    parser.add_argument("--answer", nargs=3, metavar=("MODEL", "RUN", "OUT"), help="one engine; used by the benchmark")
    asked = parser.parse_args()
    if asked.answer:
        answer(*asked.answer)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        samples = measure(Path(scratch))
    means = {sample["run"]: sample["mean"] for sample in samples}
    claims = [
        record.Claim(f"mean divergence of {name}, in floors", round(means[name] / means[FLOOR], 2), "", aim, "<=")
        for name, aim in AIMS.items()
    ]
    settings = {"command": "python -m benchmarks.kv_quality", "preset": "tiny", **SHAPE, "runs": RUNS}
    record.write(QUALITY, settings | {"prompts": PROMPTS, "length": LENGTH, "chunk": CHUNK}, samples, claims)
    print(quality())
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
