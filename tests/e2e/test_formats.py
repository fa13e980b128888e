"""Quantized checkpoints give the greedy tokens of transformers' model with the dequantized weights.

Two checkpoints hold every scheme of integers at once, a third is in NVFP4: see demo/checkpoint/formats/recipes.py.  The
mixed one has half of its six-bit layers packed with gaps, is damaged as an exporter did it and then repaired, and has a
draft module, which an engine without speculative decoding passes over; gptqmodel's has the tensor names of the multimodal
release and the model's name of the first day.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from demo import reference
from demo.checkpoint.formats.recipes import RECIPES
from demo.checkpoint.formats.write import MULTIMODAL, PLAIN, quantize
from demo.checkpoint.geometry import PRESETS
from demo.checkpoint.write import build
from vllm.ampere.checkpoint import read
from vllm.ampere.findings import findings
from vllm.ampere.repair import repair
from vllm.model_executor.layers.quantization.dequantized.reference import unpack

from .compare import check_answer, check_prompts
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ANSWER = 12

#: recipe, stages; an engine is half a minute, so the other combinations are in a record (benchmarks/formats_cpu.py)
RUNS = [("mix", 2), ("gptq", 1), ("nvfp4", 2)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats") / "bf16"
    build(folder, PRESETS["groups"])
    return folder


@pytest.fixture(scope="module")
def pairs(source, tmp_path_factory):
    made = {}

    def get(recipe: str):
        if recipe not in made:
            prefix = MULTIMODAL if recipe == "gptq" else PLAIN
            out = tmp_path_factory.mktemp(recipe)
            pair = quantize(source, out, RECIPES[recipe], prefix=prefix, with_mtp=recipe == "mix")
            if recipe == "mix":
                _leave_gaps(pair.quantized, layers="02468")
                pair = replace(pair, quantized=_damaged_and_repaired(pair.quantized, out / "repaired"))
            if recipe == "gptq":
                _name_as_on_day_zero(pair.quantized / "config.json")
            made[recipe] = pair, reference.load(pair.dequantized)
        return made[recipe]

    return get


def _leave_gaps(folder: Path, layers: str) -> None:
    """Pack the six-bit weights of these layers as compressed-tensors 0.17, which is installed, does it itself."""
    written = 0
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        for name, words in held.items():
            shape = held.get(name.replace("_packed", "_shape")) if name.endswith("weight_packed") else None
            if shape is None or words.shape[1] * 32 != shape[1] * 6 or name.split(".layers.")[-1][0] not in layers:
                continue
            values = unpack(words, 6, int(shape[1])).to(torch.int8) - 32
            held[name] = pack_to_int32(values, 6)
            written += 1
        save_file(held, file, metadata={"format": "pt"})
    assert written


def _damaged_and_repaired(folder: Path, out: Path) -> Path:
    """What an exporter did that gave every group the target Linear, and what the check's repair makes of it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = ["Linear"]
    file.write_text(json.dumps(config))
    checkpoint = read(folder)
    found = findings(checkpoint)
    assert "SharedTarget" in {finding.name for finding in found}
    repair(checkpoint, found, out)
    return out


def _name_as_on_day_zero(file: Path) -> None:
    old = {"architectures": ["Qwen3_8FlashNextForCausalLM"], "model_type": "qwen3_8_flash_next_text"}
    file.write_text(json.dumps(json.loads(file.read_text()) | old))


@pytest.mark.parametrize(("recipe", "stages"), RUNS)
def test_equals_the_dequantized_model(recipe, stages, pairs, run_job, figures):
    pair, model = pairs(recipe)
    # Past the indexer's budget of 64 tokens, in chunks of 64; and one that is shorter than a chunk.
    asked = [decisive(model, 150, ANSWER, seed=1), decisive(model, 23, ANSWER, seed=3)]
    batch = [{"prompt": prompt, "length": ANSWER, "prompt_logprobs": True} for prompt, _ in asked]
    done = run_job(
        pair.quantized,
        [batch],
        pipeline_parallel_size=stages,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    (results,) = done["batches"]
    largest = max(check_answer(result, expected) for result, (_, expected) in zip(results, asked, strict=True))
    expected = (reference.prompt_logprobs(model, prompt) for prompt, _ in asked)
    difference = check_prompts(zip(results, expected, strict=True))
    figures(f"{recipe}, {stages} stage(s)", largest, str(difference))
