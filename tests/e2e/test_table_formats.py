"""An fp8 table end to end: tokens are those of transformers with the dequantized table, and files stay closed.

An engine is half a minute, so the other row formats, and tables in memory, are in a record (benchmarks/table_formats.py).
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from demo import reference
from demo.checkpoint.table_formats import recode
from vllm.ampere.command import main

from .compare import check_answer, check_prompt
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ANSWER = 12
TABLE_FILES = {"table-1-of-2.safetensors", "table-2-of-2.safetensors"}


@pytest.fixture(scope="module")
def coded(checkpoint, tmp_path_factory):
    """``coded(form)``: a checkpoint with its table in that form, and prompts with transformers' answers."""

    def make(form: str):
        folder = tmp_path_factory.mktemp("tables") / form
        model = reference.load(recode(checkpoint("ple-early"), folder, form))
        prompts = [decisive(model, length, ANSWER, seed=length) for length in (70, 23, 2)]
        return folder, model, prompts

    return make


def ask(run_job, folder: Path, prompts, **settings):
    batches = [[{"prompt": prompts[0][0], "length": ANSWER, "prompt_logprobs": True}]]
    batches.append([{"prompt": prompt, "length": ANSWER} for prompt, _ in prompts])
    return run_job(folder, batches, max_num_batched_tokens=64, **settings)["batches"]


def check(answers, model, prompts, figures, what: str) -> None:
    ((alone,), packed) = answers
    difference = check_prompt(alone, reference.prompt_logprobs(model, prompts[0][0]))
    largest = max(check_answer(result, expected) for result, (_, expected) in zip(packed, prompts, strict=True))
    figures(what, largest, str(difference))


def test_one_scale_two_stages_rows_from_files(coded, run_job, figures, tmp_path):
    """The stage without the table opens none of its files; the other reads no row of it while loading."""
    folder, model, prompts = coded("scaled")
    notes = tmp_path / "opened.txt"
    answers = ask(
        run_job,
        folder,
        prompts,
        partition="5,7",
        pipeline_parallel_size=2,
        watch=notes,
    )
    check(answers, model, prompts, figures, "fp8 table, one scale, in files, 2 stages")
    opened, taken = defaultdict(set), defaultdict(int)
    for line in notes.read_text().splitlines():
        process, file, size = line.split(",")
        opened[process].add(file)
        taken[process] += int(size)
    stages = sorted(process for process in taken if taken[process])
    assert len(stages) == 2, opened
    assert TABLE_FILES <= opened[stages[0]] and not TABLE_FILES & opened[stages[1]]
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    # Nothing is taken twice or for nothing; of the table nothing at all.
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    without_table = sum(sizes[file] for file in set(index.values()) - TABLE_FILES)
    assert sum(taken.values()) < 1.02 * without_table
    assert all(value < 0.8 * without_table for value in taken.values())


def test_scales_of_rows_from_one_flat_file(coded, run_job, figures, tmp_path):
    """Rows and their scales lie together in it; the checkpoint's own table is not opened beyond its headers and a few
    rows that are compared."""
    folder, model, prompts = coded("row-scaled")
    flat = tmp_path / "table.flat"
    assert main(["flatten-ple", str(folder), str(flat)]) == 0
    answers = ask(run_job, folder, prompts, engram_config={"host_file_path": str(flat)})
    check(answers, model, prompts, figures, "fp8 table, scales of rows, flat file, 1 stage")
