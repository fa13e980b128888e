"""Quantized checkpoints give the greedy tokens of transformers' model with the dequantized weights.

Two checkpoints hold every scheme at once: see demo/checkpoint/formats/recipes.py.  The mixed one has a draft module,
which an engine without speculative decoding passes over; the other one has the tensor names of the multimodal release
and the model's name of the first day.
"""

import json
from pathlib import Path

import pytest

from demo import reference
from demo.checkpoint.formats.recipes import RECIPES
from demo.checkpoint.formats.write import MULTIMODAL, PLAIN, quantize
from demo.checkpoint.geometry import PRESETS
from demo.checkpoint.write import build

from .compare import check_answer, check_prompt
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ANSWER = 12

#: recipe, stages; an engine is half a minute, so the other combinations are in a record (benchmarks/formats_cpu.py)
RUNS = [("mix", 2), ("gptq", 1)]


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
            if recipe == "gptq":
                _name_as_on_day_zero(pair.quantized / "config.json")
            made[recipe] = pair, reference.load(pair.dequantized)
        return made[recipe]

    return get


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
    for result, (prompt, expected) in zip(done["batches"][0], asked, strict=True):
        largest = check_answer(result, expected)
        difference = check_prompt(result, reference.prompt_logprobs(model, prompt))
        figures(f"{recipe}, {stages} stage(s)", largest, str(difference))
