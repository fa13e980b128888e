"""The fork on GPUs against transformers on the CPU: equal greedy tokens under stages, graphs, a table on disk, K/V in
one byte or in host memory, and NVFP4 weights.

    python -m benchmarks.gpu_parity prepare DIR     here: small checkpoints and transformers' tokens for their prompts
    python benchmarks/gpu_parity.py run DIR OUT [WORD]
        on GPUs: every case that they allow (and that has WORD in its name); writes OUT, fails on a difference
    python -m benchmarks.gpu_parity record RAW OUT COMMIT   here: a run's OUT as a record under docs/ampere-multigpu/benches

Checkpoints have the sparse budget of the real model (2048), the smallest that the CUDA top-k takes, and one prompt is
beyond it.  Of weights that no CPU computes with, transformers has the dequantized ones.  Every case is a process of its own, so that one that dies leaves the others their GPUs, and a few run
at once: nothing is timed, and most of a case is imports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

PROMPT_LENGTHS = (17, 150, 2300)
NEW_TOKENS = 20
#: a choice closer than this (in logits) is one that bfloat16's rounding may turn; no later token is compared
NEAR_TIE = 0.1
#: The same where K/V are rounded to one byte, which transformers' are not: int8 and fp8 move logits of this checkpoint
#: by a few tenths.
NEAR_TIES = {"int8_per_token_head": 0.5, "fp8": 1.0}
AT_ONCE = 4
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
PINNED, ON_DISK = {"host_file_gather": False}, {"host_file_gather": True}

#: Folder of the checkpoint that a case serves, and its answers in FOLDER.json.
MODEL, NVFP4 = "model", "nvfp4"
HOST = {"kv_offload": True, "kv_offload_max_gib": 1.0}


def _kv(**more) -> dict:
    """Engine arguments of a case about K/V."""
    return {"engram_config": ON_DISK, "compilation_config": GRAPHS, **more}


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
    "one stage, bf16 K/V, our kernels, graphs": (1, None, _kv(qsa_config={"kernels": "ours"})),
    "one stage, int8 K/V, graphs": (1, None, _kv(kv_cache_dtype="int8_per_token_head")),
    "one stage, fp8 K/V, graphs": (1, None, _kv(kv_cache_dtype="fp8")),
    "two stages, int8 K/V, graphs": (2, None, _kv(kv_cache_dtype="int8_per_token_head")),
    "one stage, K/V in host memory, graphs": (1, None, _kv(qsa_config=HOST)),
    "one stage, K/V in host memory, eager": (
        1, None, {"engram_config": ON_DISK, "enforce_eager": True, "qsa_config": HOST},
    ),
    "two stages, int8 K/V in host memory, graphs": (
        2, None, _kv(qsa_config=HOST, kv_cache_dtype="int8_per_token_head"),
    ),
    "one stage, NVFP4 weights, graphs": (1, None, _kv(model=NVFP4)),
    "two stages, NVFP4 weights, graphs": (2, None, _kv(model=NVFP4)),
}  # fmt: skip


def prompt(length: int) -> list[int]:
    """Ordinary tokens (from 16 on) without a period shorter than the prompt."""
    return [16 + (7 * i * i + 3 * i + i // 480) % 480 for i in range(length)]


def prepare(folder: Path) -> None:
    from demo.checkpoint.formats import RECIPES, quantize
    from demo.checkpoint.geometry import PRESETS, geometry
    from demo.checkpoint.write import build

    build(folder / MODEL, geometry("tiny", indexer_budget=2048))
    _answer(folder / MODEL, folder / f"{MODEL}.json")
    with tempfile.TemporaryDirectory() as scratch:
        # Widths that kernels for packed weights take, and little else: it has to travel.
        overrides = PRESETS["groups"].overrides | {"hc_lowrank": 16}
        shape = geometry("groups", indexer_budget=2048, num_hidden_layers=4, num_experts=4, overrides=overrides)
        build(Path(scratch) / "source", shape)
        pair = quantize(Path(scratch) / "source", Path(scratch) / "out", RECIPES["nvfp4"])
        _answer(pair.dequantized, folder / f"{NVFP4}.json")
        shutil.copytree(pair.quantized, folder / NVFP4)


def _answer(checkpoint: Path, out: Path) -> None:
    from demo import reference

    model = reference.load(checkpoint)
    answers = {n: reference.greedy(model, prompt(n), NEW_TOKENS) for n in PROMPT_LENGTHS}
    kept = {n: {"tokens": a.tokens, "margins": a.margins} for n, a in answers.items()}
    out.write_text(json.dumps(kept))
    print(f"{out}: tokens to compare { ({n: decided(a) for n, a in kept.items()}) } of {NEW_TOKENS} each")


def decided(answer: dict, near_tie: float = NEAR_TIE) -> int:
    """How many tokens come before the first near tie."""
    close = (i for i, margin in enumerate(answer["margins"]) if margin < near_tie)
    return next(close, len(answer["margins"]))


def run(folder: Path, out: Path, word: str = "") -> int:
    import torch

    gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    wanted = {name: json.loads((folder / f"{name}.json").read_text()) for name in (MODEL, NVFP4)}
    device = f"{gpus} x {torch.cuda.get_device_name(0)}"
    chosen = {name: case for name, case in CASES.items() if word in name}
    rows = [{"case": name, "result": f"not run: {gpus} GPU(s)"} for name, case in chosen.items() if case[0] > gpus]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {}
        for number, (name, case) in enumerate(chosen.items()):
            if case[0] <= gpus:
                runs[pool.submit(_one, folder, visible[number % gpus], *case)] = name
        for done in as_completed(runs):
            arguments = CASES[runs[done]][2]
            rows.append(
                {"case": runs[done], **compared(done.result(), wanted[arguments.get("model", MODEL)], arguments)}
            )
            print(json.dumps(rows[-1]), flush=True)
            # After every case: a run that is cut short has lost only the last ones.
            out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))
    return 0 if all(row["result"] == "equal" or "not run" in row["result"] for row in rows) else 1


def compared(row: dict, wanted: dict, arguments: dict) -> dict:
    """A case's row with its tokens replaced by how they compare with transformers'."""
    tokens = row.pop("tokens", None)
    if tokens is None:
        return row
    tie = NEAR_TIES.get(arguments.get("kv_cache_dtype"), NEAR_TIE)
    counts = {n: decided(answer, tie) for n, answer in wanted.items()}
    same = {n: tokens[n][:k] == wanted[n]["tokens"][:k] for n, k in counts.items()}
    return row | {
        "compared": counts, "near_tie": tie, "equal": same, "result": "equal" if all(same.values()) else "DIFFERENT"
    }  # fmt: skip


def _one(folder: Path, gpu: str, stages: int, partition: str | None, arguments: dict) -> dict:
    job = {"pipeline_parallel_size": stages, **arguments, "model": str(folder / arguments.get("model", MODEL))}
    env = os.environ | ({"VLLM_PP_LAYER_PARTITION": partition} if partition else {})
    if stages == 1:
        # One process: imports are most of a case.
        env |= {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
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
        # Several cases share a GPU.
        gpu_memory_utilization=0.1,
        skip_tokenizer_init=True,
        attention_config={"flash_attn_version": 2},
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt(n)} for n in PROMPT_LENGTHS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = {str(n): list(o.outputs[0].token_ids) for n, o in zip(PROMPT_LENGTHS, outputs)}
    result.write_text(json.dumps({"tokens": tokens}))


def record(raw: Path, out: Path, commit: str) -> None:
    from benchmarks.record import Claim, write

    found = json.loads(raw.read_text())
    # Cases for more GPUs than there were say so in the samples, and count for nothing.
    measured = [row["result"] for row in found["rows"] if not row["result"].startswith("not run")]
    equal, cases = measured.count("equal"), len(measured)
    claim = Claim("cases whose greedy tokens equal transformers'", equal, f"of {cases} cases", cases, ">=")
    settings = {
        "command": "python benchmarks/gpu_parity.py run DIR OUT", "torch": found["torch"], "prompts": PROMPT_LENGTHS,
        "new_tokens": NEW_TOKENS, "cases": {row["case"]: CASES[row["case"]][2] for row in found["rows"]},
    }  # fmt: skip
    # The machine that measured is another one, of which the run kept its GPUs.
    write(
        out,
        settings,
        found["rows"],
        [claim],
        elsewhere={"cpu": "not recorded", "gpus": found["device"]},
        measured=commit,
    )


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "prepare":
        prepare(Path(rest[0]))
    elif command == "run":
        sys.exit(run(Path(rest[0]), Path(rest[1]), *rest[2:]))
    elif command == "record":
        record(Path(rest[0]), Path(rest[1]), rest[2])
    elif command == "case":
        case(json.loads(rest[0]), Path(rest[1]))
    else:
        sys.exit(f"gpu_parity: prepare, run, record or case, not {command!r}")
