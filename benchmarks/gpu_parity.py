"""The fork on GPUs against transformers on the CPU: equal greedy tokens under stages, graphs and a table on disk.

    python -m benchmarks.gpu_parity prepare DIR     here: a small checkpoint and transformers' tokens for its prompts
    python benchmarks/gpu_parity.py run DIR OUT [WORD]
        on GPUs: every case that they allow (and that has WORD in its name); writes OUT, fails on a difference

The checkpoint has the sparse budget of the real model (2048), the smallest that the CUDA top-k takes, and one
prompt beyond it.  Every case is a process of its own, so that one that dies leaves the others their GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT_LENGTHS = (17, 150, 2300)
NEW_TOKENS = 20
#: a choice closer than this (in logits) is one that bfloat16's rounding may turn; no later token is compared
NEAR_TIE = 0.1
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
PINNED, ON_DISK = {"host_file_gather": False}, {"host_file_gather": True}

#: name -> (stages, partition or None, engine arguments)
CASES = {
    "one stage, table on disk, graphs": (1, None, {"engram_config": ON_DISK, "compilation_config": GRAPHS}),
    "one stage, table pinned, graphs": (1, None, {"engram_config": PINNED, "compilation_config": GRAPHS}),
    "one stage, table on disk, eager": (1, None, {"engram_config": ON_DISK, "enforce_eager": True}),
    "two stages, table on disk, eager": (2, None, {"engram_config": ON_DISK, "enforce_eager": True}),
    "two stages, table on disk, graphs": (2, None, {"engram_config": ON_DISK, "compilation_config": GRAPHS}),
    "two stages, table pinned, graphs": (2, None, {"engram_config": PINNED, "compilation_config": GRAPHS}),
    "two stages, no sparse layer on the first": (2, "2,6", {"engram_config": ON_DISK, "compilation_config": GRAPHS}),
    "two stages, table on the second": (2, "1,7", {"engram_config": ON_DISK, "compilation_config": GRAPHS}),
}


def prompt(length: int) -> list[int]:
    """Ordinary tokens (from 16 on) without a period shorter than the prompt."""
    return [16 + (7 * i * i + 3 * i + i // 480) % 480 for i in range(length)]


def prepare(folder: Path) -> None:
    from demo import reference
    from demo.checkpoint.geometry import geometry
    from demo.checkpoint.write import build

    shape = geometry("tiny", indexer_budget=2048)
    build(folder / "model", shape)
    model = reference.load(folder / "model")
    answers = {n: reference.greedy(model, prompt(n), NEW_TOKENS) for n in PROMPT_LENGTHS}
    kept = {n: {"tokens": a.tokens, "margins": a.margins} for n, a in answers.items()}
    (folder / "reference.json").write_text(json.dumps(kept))
    print(f"{folder}: tokens to compare { ({n: decided(a) for n, a in kept.items()}) } of {NEW_TOKENS} each")


def decided(answer: dict) -> int:
    """How many tokens come before the first near tie."""
    close = (i for i, margin in enumerate(answer["margins"]) if margin < NEAR_TIE)
    return next(close, len(answer["margins"]))


def run(folder: Path, out: Path, word: str = "") -> int:
    import torch

    gpus = torch.cuda.device_count()
    wanted = json.loads((folder / "reference.json").read_text())
    rows = []
    device = f"{gpus} x {torch.cuda.get_device_name(0)}"
    for name, (stages, partition, arguments) in CASES.items():
        if word not in name:
            continue
        if stages > gpus:
            rows.append({"case": name, "result": f"not run: {gpus} GPU(s)"})
            continue
        row = _one(folder, stages, partition, arguments)
        tokens = row.pop("tokens", None)
        if tokens is not None:
            row["compared"] = {n: decided(answer) for n, answer in wanted.items()}
            same = {n: tokens[n][:k] == wanted[n]["tokens"][:k] for n, k in row["compared"].items()}
            row["equal"] = same
            row["result"] = "equal" if all(same.values()) else "DIFFERENT"
        rows.append({"case": name, **row})
        print(json.dumps(rows[-1]), flush=True)
        # After every case: a run that is cut short has lost only the last one.
        out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))
    return 0 if all(row["result"] in ("equal",) or "not run" in row["result"] for row in rows) else 1


def _one(folder: Path, stages: int, partition: str | None, arguments: dict) -> dict:
    job = {"model": str(folder / "model"), "pipeline_parallel_size": stages, **arguments}
    env = os.environ | ({"VLLM_PP_LAYER_PARTITION": partition} if partition else {})
    with tempfile.TemporaryDirectory() as scratch:
        result, start = Path(scratch) / "result", time.time()
        with open(Path(scratch) / "log", "w+") as log:
            try:
                code = subprocess.run(
                    [sys.executable, __file__, "case", json.dumps(job), str(result)],
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=200,
                ).returncode
            except subprocess.TimeoutExpired:
                code = "no end within 200 s"
            log.seek(0)
            lines = log.read().splitlines()
        if code != 0:
            errors = [line for line in lines if "Error" in line][-3:]
            return {"result": f"exit {code}", "errors": errors, "tail": lines[-4:]}
        return json.loads(result.read_text()) | {"seconds": round(time.time() - start, 1)}


def case(job: dict, result: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        **job,
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 30,
        skip_tokenizer_init=True,
        attention_config={"flash_attn_version": 2},
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt(n)} for n in PROMPT_LENGTHS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = {str(n): list(o.outputs[0].token_ids) for n, o in zip(PROMPT_LENGTHS, outputs)}
    result.write_text(json.dumps({"tokens": tokens}))


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "prepare":
        prepare(Path(rest[0]))
    elif command == "run":
        sys.exit(run(Path(rest[0]), Path(rest[1]), *rest[2:]))
    elif command == "case":
        case(json.loads(rest[0]), Path(rest[1]))
    else:
        sys.exit(f"gpu_parity: prepare, run or case, not {command!r}")
