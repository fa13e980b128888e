"""Serve a few prompts with one setting of the table, and say what it took.

    python serve_once.py MODEL '{"host_file_gather": true}'

The last line of output is JSON: ``tokens`` and their ``logprobs`` (lists per prompt); ``pss`` and
``peak`` in bytes: the proportional memory of all processes of the engine after serving, and the
largest resident size that any of them ever had.
"""

import json
import sys

import psutil


def memory() -> tuple[int, int]:
    """Bytes: summed PSS, and the highest peak, of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    peaks = []
    for process in processes:
        with open(f"/proc/{process.pid}/status") as status:
            peaks += [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")]
    return sum(process.memory_full_info().pss for process in processes), max(peaks)


def main(model: str, engram: dict) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        engram_config=engram,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,  # the longer prompts come in chunks
        kv_cache_memory_bytes=128 << 20,
    )
    prompts = [{"prompt_token_ids": [(7 * i * i + 3 * i + 11) % 480 + 5 for i in range(n)]} for n in (17, 150, 3, 90)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    answers = [request.outputs[0] for request in engine.generate(prompts, sampling, use_tqdm=False)]
    pss, peak = memory()
    result = {
        "tokens": [answer.token_ids for answer in answers],
        "logprobs": [[step[t].logprob for t, step in zip(a.token_ids, a.logprobs, strict=True)] for a in answers],
        "pss": pss,
        "peak": peak,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
