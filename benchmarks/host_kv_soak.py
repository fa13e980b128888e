"""Mixed requests with aborts over K/V in host memory: blocks come back, resident memory is flat, answers stay the same.

    python -m benchmarks.host_kv_soak MODEL OUT MINUTES [--stages N] [--seed N] [--without]

Rounds of twelve requests: prompts of 3 to 1,400 tokens, a third of them sharing a prefix, answers of 1 to 24 tokens, a
third aborted somewhere, more than the blocks hold at once. After each round nothing is running: free blocks have to be
what they were at the start, a fixed prompt has to be answered as at the start, and the resident memory of the engine
and its stages is noted. MODEL is a checkpoint of `python -m demo.checkpoint`. OUT is written after every round, so that
a run which is cut off says how far it came. A GPU works too: the same program, rows behind PCIe.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import time
from pathlib import Path

import psutil

from benchmarks import record

REQUESTS, ABORTED, SHARED = 12, 1 / 3, 1 / 3
ARENA = 66_048
PROBE = [17 + 7 * n % 400 for n in range(700)]
#: Share of the rounds that warm up: pages of the pool are touched for the first time, caches of allocators fill.
WARM = 0.4
#: Growth of resident memory after that, which a leak of one block of rows a round (0.3 MB here) exceeds within minutes.
FLAT_MB = 32.0


def start(model: str, stages: int, offload: bool):
    # The engine core in this process, so that its block pool can be asked.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On a CPU oneDNN keeps what it compiled for 1,024 shapes, and every number of tokens is a shape: 0.24 MB a step for
    # an hour, with K/V in host memory and without (0.007 MB with this), which would hide a leak of rows.
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"
    from vllm import LLM

    return LLM(
        model,
        pipeline_parallel_size=stages,
        max_model_len=1536,
        max_num_seqs=8,
        max_num_batched_tokens=200,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=48,
        skip_tokenizer_init=True,
        # At low priority, beside other work, a stage may wait for its turn for longer than a server would.
        watchdog_config={"silence_limit": 300},
        qsa_config={"kv_offload": True, "arena_bytes": ARENA} if offload else None,
    ).llm_engine


def pool_of(engine):
    return engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def ask(engine, name: str, prompt: list[int], length: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def probe(engine) -> list[int]:
    """The fixed prompt's answer, alone."""
    engine.reset_prefix_cache()
    ask(engine, "probe", PROBE, 8)
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens


def requests(dice: random.Random, prefix: list[int]) -> list[tuple[list[int], int]]:
    """Prompts and lengths of answers of one round."""
    made = []
    for _ in range(REQUESTS):
        prompt = [dice.randint(16, 495) for _ in range(dice.choice((3, 40, 200, 500, 700)))]
        made.append((prefix + prompt if dice.random() < SHARED else prompt, dice.randint(1, 24)))
    return made


def round_of(engine, number: int, dice: random.Random, prefix: list[int]) -> dict:
    """Run a round to its end; how many requests ended and how many were aborted."""
    jobs = {f"{number}-{at}": job for at, job in enumerate(requests(dice, prefix))}
    for name, (prompt, length) in jobs.items():
        ask(engine, name, prompt, length)
    # Some before they are scheduled, some in the middle of a prompt or of an answer.
    doomed = {name: dice.randint(0, 40) for name in jobs if dice.random() < ABORTED}
    steps = ended = 0
    while engine.has_unfinished_requests():
        if due := [name for name, step in doomed.items() if step <= steps]:
            engine.abort_request(due)
            for name in due:
                del doomed[name]
        ended += sum(output.finished for output in engine.step())
        steps += 1
    return {"steps": steps, "ended": ended, "aborted": REQUESTS - ended}


def trim(_worker: object = None) -> int:
    """Give what the C library's heap holds free back to the system.

    Tensors of a few MB come from that heap and leave holes of every size.
    """
    return ctypes.CDLL(None).malloc_trim(0)


def resident_mb(engine) -> float:
    """Of this process and its stages."""
    trim()
    engine.collective_rpc(trim)
    me = psutil.Process()
    return sum(p.memory_info().rss for p in (me, *me.children(recursive=True))) / 1e6


def soak(model: str, out: Path, minutes: float, stages: int, seed: int, offload: bool) -> None:
    engine = start(model, stages, offload)
    dice = random.Random(seed)
    prefix = [dice.randint(16, 495) for _ in range(640)]
    expected, free = probe(engine), pool_of(engine).get_num_free_blocks()
    settings = {
        "minutes": minutes,
        "stages": stages,
        "seed": seed,
        "blocks": pool_of(engine).num_gpu_blocks,
        "block_size": engine.vllm_config.cache_config.block_size,
        "arena_bytes": ARENA if offload else None,
        "requests_per_round": REQUESTS,
    }
    measured = record.commit()
    samples: list[dict] = []
    began = time.monotonic()
    while time.monotonic() - began < 60 * minutes or len(samples) < 4:
        sample = round_of(engine, len(samples), dice, prefix)
        sample["free_blocks"] = pool_of(engine).get_num_free_blocks()
        sample["same_answer"] = probe(engine) == expected
        sample |= {"seconds": round(time.monotonic() - began, 1), "resident_mb": round(resident_mb(engine), 1)}
        samples.append(sample)
        record.write(out, settings | {"free_blocks_at_start": free}, samples, claims(samples, free), measured=measured)
    assert pool_of(engine).get_num_free_blocks() == free


def claims(samples: list[dict], free: int) -> list[record.Claim]:
    """Over all rounds; growth is of the last third over the first rounds after warming up."""
    warm = samples[int(len(samples) * WARM) :]
    third = max(1, len(warm) // 3)
    growth = mean(s["resident_mb"] for s in warm[-third:]) - mean(s["resident_mb"] for s in warm[:third])
    lost = max(abs(free - sample["free_blocks"]) for sample in samples)
    return [
        record.Claim("blocks that did not come back, most after any round", lost, "blocks", 0, "<="),
        record.Claim("rounds with another answer", sum(not s["same_answer"] for s in samples), "rounds", 0, "<="),
        record.Claim("growth of resident memory after warming up", round(growth, 1), "MB", FLAT_MB, "<="),
    ]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="store_true", help="K/V as upstream keeps it, to compare with")
    given = parser.parse_args()
    soak(given.model, given.out, given.minutes, given.stages, given.seed, not given.without)


if __name__ == "__main__":
    main()
