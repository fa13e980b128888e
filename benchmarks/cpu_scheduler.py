"""The pipeline scheduler against upstream's, on three stages without a GPU: who shares a micro-batch, who waits.

    python -m benchmarks.cpu_scheduler CHECKPOINT [ROUNDS]     writes pipeline-cpu-scheduler.json

Each scheduler gets ROUNDS engines (2 unless said), in turns, since other work on the machine comes and goes.  An engine
serves 3 and then 6 users who ask at the same time, and then a short prompt that arrives behind a long one.  Stages are
processes on a core or less each, so the rates say how much of the machine a scheduler keeps busy, not how fast a card
would be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks import record

STAGES = 3
#: Tokens of a micro-batch: small, so that a prompt of a tiny model is the work of many.
BUDGET = 64
ANSWER = 48
LONG, SHORT = 2400, 40
#: A choice closer than this (in logits) is one that bfloat16 may turn when other requests share the batch.
NEAR_TIE = 0.1
SCHEDULERS = {
    "upstream": "vllm.v1.core.sched.scheduler.Scheduler",
    "pipeline": "vllm.v1.core.sched.pipeline.PipelineScheduler",
}


def prompt(length: int, seed: int) -> list[int]:
    """Ordinary tokens (from 16 on) without a period shorter than the prompt."""
    return [16 + (7 * i * i + (3 + 2 * seed) * i + i // 480) % 480 for i in range(length)]


class Serving:
    """An engine in this process whose scheduler can be watched."""

    def __init__(self, checkpoint: str, scheduler: str) -> None:
        from vllm import LLM

        llm = LLM(
            checkpoint,
            pipeline_parallel_size=STAGES,
            scheduler_cls=scheduler,
            max_model_len=LONG + 2 * ANSWER,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=8,
            # Spread, as on GPUs; on a CPU the default is one batch, because of what this measures.
            additional_config={"pipeline_scheduler": {"min_decode_batch": 1}} if "Pipeline" in scheduler else {},
            kv_cache_memory_bytes=128 << 20,
        )
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        #: Requests that decode in each micro-batch, and its tokens.
        self.micro_batches: list[tuple[int, int]] = []
        schedule = self.scheduler.schedule

        def watched(*args):
            decoding = {request.request_id for request in self.scheduler.running if not request.is_prefill_chunk}
            output = schedule(*args)
            scheduled = output.num_scheduled_tokens
            self.micro_batches.append((len(decoding & scheduled.keys()), sum(scheduled.values())))
            return output

        self.scheduler.schedule = watched

    def ask(self, name: str, tokens: list[int], length: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=2)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def run(self, on_token=lambda name, number: None, until=lambda: False) -> dict[str, dict]:
        """Serve until nothing is left, or `until` says so; answers by name, with each token's margin over the next."""
        answers = {}
        while self.engine.has_unfinished_requests() and not until():
            for output in self.engine.step():
                answer = output.outputs[0]
                on_token(output.request_id, len(answer.token_ids))
                if output.finished:
                    best = [
                        sorted((entry.logprob for entry in token.values()), reverse=True) for token in answer.logprobs
                    ]
                    margins = [round(logprobs[0] - logprobs[1], 4) for logprobs in best]
                    answers[output.request_id] = {"tokens": list(answer.token_ids), "margins": margins}
        return answers


def users(serving: Serving, number: int) -> dict:
    """Everybody asks at once; decode is timed from the last first token to the first end."""
    serving.micro_batches.clear()
    first, end = {}, {}

    def on_token(name: str, tokens: int) -> None:
        first.setdefault(name, (time.monotonic(), len(serving.micro_batches)))
        if tokens == ANSWER:
            end[name] = (time.monotonic(), len(serving.micro_batches))

    for user in range(number):
        serving.ask(f"{number}-{user}", prompt(10 + user, seed=10 * number + user), ANSWER)
    answers = serving.run(on_token)
    start, stop = max(first.values()), min(end.values())
    sizes = [decodes for decodes, _ in serving.micro_batches]
    steady = sizes[start[1] + STAGES : stop[1] - STAGES]
    rate = (ANSWER - 1) / (max(end.values())[0] - min(first.values())[0])
    return {
        "users": number,
        "decoding_per_micro_batch": sizes,
        "steady": {str(size): count for size, count in sorted(Counter(steady).items())},
        "tokens_per_s_per_user": round(rate, 2),
        "answers": answers,
    }


def short_behind_long(serving: Serving) -> dict:
    """Seconds and micro-batches from the short request to its first token, and of the long one to its own."""
    serving.micro_batches.clear()
    asked, waited = {}, {}

    def now() -> tuple[float, int]:
        return time.monotonic(), len(serving.micro_batches)

    def on_token(name: str, tokens: int) -> None:
        if name not in waited:
            waited[name] = [round(b - a, 3) for a, b in zip(asked[name], now(), strict=True)]

    asked["long"] = now()
    serving.ask("long", prompt(LONG, seed=5), 8)
    serving.run(on_token, until=lambda: len(serving.micro_batches) >= 6)
    asked["short"] = now()
    serving.ask("short", prompt(SHORT, seed=6), 8)
    answers = serving.run(on_token)
    return {"first_token_s_and_micro_batches": waited, "answers": answers}


def one_engine(checkpoint: str, scheduler: str, out: str) -> None:
    serving = Serving(checkpoint, scheduler)
    users(serving, 2)  # kernels compiled and pages touched
    measured = {"users": [users(serving, number) for number in (3, 6)], "mixed": short_behind_long(serving)}
    Path(out).write_text(json.dumps(measured))


def differences(ours: dict[str, dict], theirs: dict[str, dict]) -> tuple[int, int, list[float]]:
    """Tokens that agree, tokens compared, and the margins of the choices at which two answers part."""
    agree = compared = 0
    margins = []
    for name, answer in ours.items():
        other = theirs[name]["tokens"]
        part = next((i for i, pair in enumerate(zip(answer["tokens"], other)) if pair[0] != pair[1]), len(other))
        agree += part
        # What follows a difference answers another text.
        compared += min(part + 1, len(other))
        margins += answer["margins"][part : part + 1]
    return agree, compared, margins


def measure(checkpoint: str, rounds: int) -> list[dict]:
    samples = []
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, scheduler in SCHEDULERS.items():
                out = Path(folder) / "out.json"
                command = [sys.executable, "-m", "benchmarks.cpu_scheduler", "engine", checkpoint, scheduler, str(out)]
                subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL)
                samples.append({"scheduler": name, "round": number} | json.loads(out.read_text()))
    return samples


def summarise(samples: list[dict]) -> list[record.Claim]:
    by_name = {name: [sample for sample in samples if sample["scheduler"] == name] for name in SCHEDULERS}
    claims = []
    for index, number in enumerate((3, 6)):
        rates = {n: median(s["users"][index]["tokens_per_s_per_user"] for s in by_name[n]) for n in SCHEDULERS}
        largest = max(int(size) for sample in by_name["pipeline"] for size in sample["users"][index]["steady"])
        claims.append(record.Claim(f"{number} users: largest micro-batch", largest, "requests", number // STAGES, "<="))
        gain = round(rates["pipeline"] / rates["upstream"], 2)
        claims.append(record.Claim(f"{number} users: rate over upstream's", gain, "x", 1.2, ">="))
    waits = {
        n: median(s["mixed"]["first_token_s_and_micro_batches"]["short"][0] for s in by_name[n]) for n in SCHEDULERS
    }
    claims.append(
        record.Claim(
            "short behind long: wait over upstream's", round(waits["pipeline"] / waits["upstream"], 3), "x", 0.5, "<="
        )
    )
    own = [median(s["mixed"]["first_token_s_and_micro_batches"]["long"][0] for s in by_name[n]) for n in SCHEDULERS]
    claims.append(record.Claim("long: its own wait over upstream's", round(own[1] / own[0], 3), "x", 1.2, "<="))
    agree = compared = 0
    margins: list[float] = []
    for ours, theirs in zip(by_name["pipeline"], by_name["upstream"], strict=True):
        for mine, other in zip([*ours["users"], ours["mixed"]], [*theirs["users"], theirs["mixed"]], strict=True):
            parts = differences(mine["answers"], other["answers"])
            agree, compared, margins = agree + parts[0], compared + parts[1], margins + parts[2]
    claims.append(record.Claim("tokens equal to upstream's scheduler", agree, "tokens", compared, ">="))
    claims.append(
        record.Claim("largest margin at which answers part", max(margins, default=0.0), "logits", NEAR_TIE, "<=")
    )
    return claims


def main(checkpoint: str, rounds: str = "2") -> None:
    samples = measure(checkpoint, int(rounds))
    claims = summarise(samples)
    settings = {
        "checkpoint": "python -m demo.checkpoint (tiny), random weights",
        "stages": STAGES,
        "max_num_batched_tokens": BUDGET,
        "answer": ANSWER,
        "long": LONG,
        "short": SHORT,
        "rounds": int(rounds),
        "steady": "micro-batches by decoding requests, from one round after the last first token to one before the first end",
        "min_decode_batch": 1,
    }
    record.write(record.FOLDER / "pipeline-cpu-scheduler.json", settings, samples, claims)
    for claim in claims:
        print(
            f"{'holds' if claim.holds else 'SHORT'}  {claim.name}: {claim.value} {claim.unit} (aim {claim.compare} {claim.aim})"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        one_engine(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_scheduler", description=__doc__.splitlines()[0])
        parser.add_argument("checkpoint", help="python -m demo.checkpoint DIR makes one")
        parser.add_argument("rounds", nargs="?", default="2", help="engines of each scheduler")
        arguments = parser.parse_args()
        main(arguments.checkpoint, arguments.rounds)
