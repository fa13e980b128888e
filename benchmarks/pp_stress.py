"""Many users on two pipeline stages with decode graphs: every greedy token is what one stage gives.

    python benchmarks/pp_stress.py MODEL OUT SECONDS

One GPU first answers a pool of prompts alone, one stage, eager.  Then two GPUs serve them as two stages with graphs
for SECONDS, to one to eight users at once whose number changes every ten seconds.  A fifth of the requests is aborted
somewhere.  Tokens are compared up to the first choice that rounding may turn; aborted answers as far as they came.
MODEL is what `benchmarks/gpu_parity.py prepare` writes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

POOL, MOST_USERS, CHANGE_SECONDS, ABORTED = 48, 8, 10.0, 0.2
#: A choice closer than this (natural log) may turn with the batch that it is computed in.
NEAR_TIE = 0.25
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def pool() -> list[dict]:
    """Prompts of 3 to 2600 tokens, most of them short, with 8 to 96 tokens to answer."""
    dice = random.Random(0)
    lengths = [dice.randint(2100, 2600) if i % 12 == 11 else dice.randint(3, 700) for i in range(POOL)]
    return [{"prompt": [dice.randint(16, 495) for _ in range(n)], "length": dice.randint(8, 96)} for n in lengths]


def engine(model: str, stages: int, **arguments):
    from vllm import LLM

    return LLM(
        model,
        pipeline_parallel_size=stages,
        max_model_len=4096,
        max_num_seqs=MOST_USERS,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 30,
        skip_tokenizer_init=True,
        attention_config={"flash_attn_version": 2},
        engram_config={"host_file_gather": True},
        **arguments,
    ).llm_engine


def ask(llm, name: str, job: dict, logprobs: int | None = None) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=job["length"], ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    llm.add_request(name, {"prompt_token_ids": job["prompt"]}, params)


def reference(model: str, out: Path) -> None:
    """Each prompt alone: its tokens, and how many come before the first near tie."""
    llm = engine(model, 1, enforce_eager=True)
    answers = []
    for number, job in enumerate(pool()):
        ask(llm, str(number), job, logprobs=2)
        final = None
        while llm.has_unfinished_requests():
            final = llm.step()[0]
        answer = final.outputs[0]
        gaps = []
        for choices in answer.logprobs:
            best = sorted((choice.logprob for choice in choices.values()), reverse=True)
            gaps.append(best[0] - best[1])
        decided = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), len(gaps))
        answers.append({"tokens": list(answer.token_ids), "decided": decided})
    out.write_text(json.dumps(answers))


def stress(model: str, answers: list[dict], seconds: float) -> dict:
    llm = engine(model, 2, compilation_config=GRAPHS)
    jobs, dice = pool(), random.Random(1)
    running: dict[str, tuple[int, int | None]] = {}  # request -> its job, and after how many tokens to abort it
    counts, users_seen, wrong = Counter(), Counter(), []
    users, started, changed, number = 1, time.time(), time.time(), 0
    while time.time() - started < seconds or running:
        if time.time() - changed > CHANGE_SECONDS:
            users, changed = dice.randint(1, MOST_USERS), time.time()
        while len(running) < users and time.time() - started < seconds:
            job, number = dice.randrange(POOL), number + 1
            abort = dice.randint(1, jobs[job]["length"]) if dice.random() < ABORTED else None
            running[str(number)] = (job, abort)
            ask(llm, str(number), jobs[job])
        users_seen[len(running)] += 1
        for output in llm.step():
            if output.request_id not in running:
                continue
            job, abort = running[output.request_id]
            tokens = list(output.outputs[0].token_ids)
            if not output.finished and (abort is None or len(tokens) < abort):
                continue
            if not output.finished:
                llm.abort_request([output.request_id])
            counts["aborted" if not output.finished else "finished"] += 1
            del running[output.request_id]
            compared = min(len(tokens), answers[job]["decided"])
            counts["tokens compared"] += compared
            counts["tokens served"] += len(tokens)
            if tokens[:compared] != answers[job]["tokens"][:compared]:
                wrong.append({"request": output.request_id, "job": job, "users": len(running) + 1, "tokens": tokens})
    return {
        "seconds": round(time.time() - started, 1),
        **counts,
        "steps by users": dict(sorted(users_seen.items())),
        "answers that differ": len(wrong),
        "first differences": wrong[:3],
    }


def main() -> int:
    model, out, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    answers = out.with_suffix(".reference")
    if len(sys.argv) > 4:
        reference(model, answers)
        return 0
    # In a process of its own, so that its GPU memory is free again.
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "reference"], check=True)
    wanted = json.loads(answers.read_text())
    result = stress(model, wanted, seconds)
    result["answers in the pool"] = {
        "decided to the end": sum(a["decided"] == len(a["tokens"]) for a in wanted),
        "of": POOL,
    }
    out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result)[:3000])
    return 1 if result["answers that differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
