"""Run requests through vLLM's offline `LLM`, as a program of its own: `engine_job.py JOB.json RESULT.json`.

A program, because an engine sets process-wide state that a second one in the same process would inherit, and because
a start costs tens of seconds: one job holds many batches.  The job is

    {"model": DIR, "engine": {keyword arguments of LLM}, "batches": [[request, ...], ...]}

with a request {"prompt": [ids], "length": n}; optional "prompt_logprobs": true.  Requests of one batch are submitted
together, batches one after the other.  The result holds for each request the tokens, their log-probabilities, those
of the prompt, the number of prompt tokens that came from the prefix cache, and `chunks`: how many of the request's
tokens the scheduler put into each step. `stored` says how the engine keeps what attention reads.  The last is what lets a test know that a prompt really was cut where it
meant to cut it.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

# The engine core in this process: requests of a batch are then all in the queue before the first step, so the cuts
# are the same in every run, and the scheduler can be watched.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def main(job_file: str, result_file: str) -> None:
    from vllm import LLM

    job = json.loads(Path(job_file).read_text())
    start = time.monotonic()
    llm = LLM(job["model"], **job["engine"])
    started = time.monotonic() - start
    chunks = watch_scheduler(llm)
    batches = [run_batch(llm, requests, chunks) for requests in job["batches"]]
    cache_config = llm.llm_engine.vllm_config.cache_config
    result = {
        "start_seconds": started,
        "run_seconds": time.monotonic() - start - started,
        "block_size": cache_config.block_size,
        "stored": stored(llm),
        "batches": batches,
    }
    Path(result_file).write_text(json.dumps(result))


def stored(llm) -> dict[str, str]:
    """The dtype that each cache of the first stage's attention layers is planned in."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    specs = {}
    for group in config.kv_cache_groups:
        one = group.kv_cache_spec
        specs |= getattr(one, "kv_cache_specs", dict.fromkeys(group.layer_names, one))
    return {name: str(spec.dtype) for name, spec in specs.items() if hasattr(spec, "dtype")}


def watch_scheduler(llm) -> dict[str, list[int]]:
    """Number of tokens scheduled in each step, by request id; filled while the engine runs."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    chunks: dict[str, list[int]] = defaultdict(list)
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        for request_id, number in output.num_scheduled_tokens.items():
            chunks[request_id].append(number)
        return output

    scheduler.schedule = watched
    return chunks


def run_batch(llm, requests: list[dict], chunks: dict[str, list[int]]) -> list[dict]:
    from vllm import SamplingParams

    chunks.clear()
    outputs = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [
            SamplingParams(
                temperature=0,
                max_tokens=request["length"],
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if request.get("prompt_logprobs") else None,
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    return [describe(output, chunks) for output in outputs]


def describe(output, chunks: dict[str, list[int]]) -> dict:
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    prompt = output.prompt_token_ids
    listed = output.prompt_logprobs or []
    return {
        "tokens": tokens,
        "logprobs": [entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)],
        # The first prompt token has none.
        "prompt_logprobs": [entry[token].logprob for entry, token in zip(listed[1:], prompt[1:], strict=bool(listed))],
        "cached": output.num_cached_tokens or 0,
        # Inside the engine a request's id is the visible one with a suffix.
        "chunks": next((steps for name, steps in chunks.items() if name.startswith(f"{output.request_id}-")), None)
        or chunks.get(output.request_id, []),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
