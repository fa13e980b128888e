"""Many users on two pipeline stages with decode graphs: every greedy token is what one stage gives.

    python benchmarks/pp_stress.py MODEL OUT SECONDS [--seed N] [--reference FILE] [--near-tie NATS] [--replay-all]

One GPU first answers a pool of prompts alone, one stage, eager, each under four cuts of the prompt (one_stage.py), a
process for each, unless FILE has the answers of such a run on the same kind of GPU.  Then two GPUs serve them as two stages with graphs for
SECONDS, to one to eight users at once whose number changes every ten seconds.  A fifth of the requests is aborted
somewhere, and half of them may use the prefix cache.

Tokens are compared up to the first choice that rounding may turn; aborted answers as far as they came.  An answer that
differs is then asked for once more, alone on one stage with its prompt cut where the scheduler had cut it: the same tokens
explain it.  OUT is written every half minute, so that a run which is cut off still says how far it came.  MODEL is what
`benchmarks/gpu_parity.py prepare` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import one_stage  # noqa: E402

POOL, MOST_USERS, CHANGE_SECONDS, ABORTED = 48, 8, 10.0, 0.2
#: Requests whose prompt is computed although the prefix cache has it: else all would be cached after a minute.
FRESH = 0.5
WRITE_SECONDS = 30.0
#: A choice closer than this (natural log) under any cut may turn with the batch that it is computed in.
NEAR_TIE = 0.25
ENGINE = {
    "max_model_len": 4096,
    "max_num_seqs": MOST_USERS,
    "max_num_batched_tokens": one_stage.WHOLE,
    "kv_cache_memory_bytes": 1 << 30,
    # What a start asks to be free: the GPUs may be shared with another run.
    "gpu_memory_utilization": 0.1,
    "skip_tokenizer_init": True,
    "attention_config": {"flash_attn_version": 2},
    "engram_config": {"host_file_gather": True},
    # A machine that others use may let a stage wait longer for a disk or a core than a server would.
    "watchdog_config": {"silence_limit": 120},
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def pool() -> list[dict]:
    """Prompts of 3 to 2600 tokens, most of them short, with 8 to 96 tokens to answer."""
    dice = random.Random(0)
    lengths = [dice.randint(2100, 2600) if i % 12 == 11 else dice.randint(3, 700) for i in range(POOL)]
    return [{"prompt": [dice.randint(16, 495) for _ in range(n)], "length": dice.randint(8, 96)} for n in lengths]


def ask(llm, name: str, job: dict, fresh: bool) -> None:
    """`fresh`: nothing of the prompt comes from the prefix cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=job["length"], ignore_eos=True, detokenize=False)
    llm.add_request(name, {"prompt_token_ids": job["prompt"]} | ({"cache_salt": name} if fresh else {}), params)


def reference(model: str, size: int, out: Path) -> None:
    """Each prompt alone on one stage, in chunks of `size`."""
    llm = one_stage.engine(model, **ENGINE)
    out.write_text(json.dumps(one_stage.in_chunks(llm, pool(), size)))


def references(alone: list[str], out: Path) -> None:
    """Answers under every cut, each from a process of its own (`alone` and its size), joined in `out`.

    At once, since most of a step is the host's: 200 s on an H200 were too few for all of them one after the other.
    """
    parts = {size: out.with_suffix(f".{size}") for size in (one_stage.WHOLE, *one_stage.CUTS)}
    runs = [
        subprocess.Popen([*alone, "--reference", str(part), "--only-reference", str(size)])
        for size, part in parts.items()
    ]
    if any([run.wait() for run in runs]):
        sys.exit("pp_stress: one stage did not answer, see above")
    out.write_text(json.dumps(one_stage.joined({size: json.loads(part.read_text()) for size, part in parts.items()})))


def replay(model: str, path: Path) -> None:
    """Answer each of the file's answers again under its cuts, and write into the file whether that gave its tokens."""
    llm, jobs = one_stage.engine(model, **ENGINE), pool()
    known: dict[tuple[int, ...], list[int]] = {}

    def explained(found: dict) -> bool:
        for cuts in found["cuts"]:
            key = (found["job"], *cuts)
            if key not in known:
                known[key] = one_stage.under(llm, jobs[found["job"]], cuts)
            if known[key][: len(found["tokens"])] == found["tokens"]:
                return True
        return False

    path.write_text(json.dumps([found | {"explained": explained(found)} for found in json.loads(path.read_text())]))


def usable(answers: Path) -> bool:
    """Whether the file has this pool's answers, under several cuts."""
    return answers.exists() and all("cuts" in answer for answer in json.loads(answers.read_text()))


def stress(
    model: str, answers: list[dict], seconds: float, seed: int, near_tie: float, turned: list[dict], cuts: Path
) -> Iterator[dict]:
    """What was seen so far, every WRITE_SECONDS and at the end.

    Answers that differ anywhere are added to `turned` with the cuts that their prompts may have had; `cuts` is a file
    that the scheduler writes.
    """
    from benchmarks import recorded_cuts
    from vllm import LLM

    os.environ[recorded_cuts.FILE] = str(cuts)
    llm = LLM(
        model,
        pipeline_parallel_size=2,
        compilation_config=GRAPHS,
        scheduler_cls="benchmarks.recorded_cuts.RecordingScheduler",
        **ENGINE,
    ).llm_engine
    jobs, dice = pool(), random.Random(seed)
    asked: dict[str, tuple[int, str | None]] = {}  # request -> its job, and its name where nothing of it is cached
    running: dict[str, tuple[int, int | None]] = {}  # request -> its job, and after how many tokens to abort it
    counts, users_seen = Counter(), Counter()
    # (job, position of the first other token, by how much it was ahead) -> requests. A choice that rounding turned comes
    # back at one position of one job; tokens that got lost would be anywhere.
    wrong: Counter[tuple[int, int, float]] = Counter()
    certain = [one_stage.decided(answer, near_tie) for answer in answers]
    users, started, changed, written, number = 1, time.time(), time.time(), time.time(), 0

    def so_far() -> dict:
        return {
            "seconds": round(time.time() - started, 1),
            "seed": seed,
            **counts,
            "steps by users": dict(sorted(users_seen.items())),
            "answers that differ": wrong.total(),
            "differences": [
                {"job": job, "position": at, "ahead": ahead, "requests": number}
                for (job, at, ahead), number in wrong.most_common()
            ],
        }

    while time.time() - started < seconds or running:
        if time.time() - changed > CHANGE_SECONDS:
            users, changed = dice.randint(1, MOST_USERS), time.time()
        while len(running) < users and time.time() - started < seconds:
            job, number = dice.randrange(POOL), number + 1
            abort = dice.randint(1, jobs[job]["length"]) if dice.random() < ABORTED else None
            name, fresh = str(number), dice.random() < FRESH
            running[name], asked[name] = (job, abort), (job, name if fresh else None)
            ask(llm, name, jobs[job], fresh)
        users_seen[len(running)] += 1
        if time.time() - written > WRITE_SECONDS:
            written = time.time()
            yield so_far()
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
            compared = min(len(tokens), certain[job])
            counts["tokens compared"] += compared
            counts["tokens served"] += len(tokens)
            wanted = answers[job]["tokens"]
            at = next((i for i, (token, want) in enumerate(zip(tokens, wanted)) if token != want), None)
            if at is not None:
                turned.append({"request": output.request_id, "job": job, "decided": at < compared, "tokens": tokens})
            if at is not None and at < compared:
                wrong[job, at, answers[job]["gaps"][at]] += 1
    histories = recorded_cuts.Histories(cuts, asked)
    for found in turned:
        found["cuts"] = histories[found["request"]]
    yield so_far()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float, help="0 answers the prompts on one stage and ends")
    parser.add_argument("--seed", type=int, default=1, help="another order of the same prompts (default: 1)")
    parser.add_argument("--reference", type=Path, help="answers of one stage; made if the file is not there")
    parser.add_argument("--near-tie", type=float, default=NEAR_TIE, help=f"in nats (default: {NEAR_TIE})")
    parser.add_argument(
        "--replay-all",
        action="store_true",
        help="ask again for every answer that differs anywhere, not only for those that differ in a decided token; on a "
        "CPU, where rounding does not depend on who shares a step, each must come out as it was",
    )
    parser.add_argument("--only-reference", type=int, metavar="SIZE", help=argparse.SUPPRESS)
    parser.add_argument("--only-replay", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    answers = asked.reference or asked.out.with_suffix(".reference")
    if asked.only_reference:
        reference(asked.model, asked.only_reference, answers)
        return 0
    if asked.only_replay:
        replay(asked.model, asked.only_replay)
        return 0
    # In processes of their own, so that their GPU memory is free again.
    alone = [sys.executable, __file__, asked.model, str(asked.out), "0"]
    if not usable(answers):
        references(alone, answers)
    if not asked.seconds:
        return 0
    wanted = json.loads(answers.read_text())
    whole = sum(one_stage.decided(answer, asked.near_tie) == len(answer["tokens"]) for answer in wanted)
    result, turned = {}, []
    cuts = asked.out.with_suffix(".cuts")
    for result in stress(asked.model, wanted, asked.seconds, asked.seed, asked.near_tie, turned, cuts):
        result["near tie"] = asked.near_tie
        result["answers in the pool"] = {"decided to the end": whole, "of": POOL}
        asked.out.write_text(json.dumps(result, indent=1))
    chosen = [found for found in turned if found["decided"] or asked.replay_all]
    if chosen:
        again = asked.out.with_suffix(".replay")
        again.write_text(json.dumps(chosen))
        subprocess.run([*alone, "--only-replay", str(again)], check=True)
        chosen = json.loads(again.read_text())
    result["answers that differ anywhere"] = len(turned)
    result["asked again under the same cuts"] = {
        "answers": len(chosen),
        "same tokens": sum(found["explained"] for found in chosen),
    }
    result["unexplained"] = sum(not found["explained"] for found in chosen)
    asked.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result)[:3000])
    return 1 if result["unexplained"] else 0


if __name__ == "__main__":
    sys.exit(main())
