"""The table of row formats, for the page about loading."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.record import FOLDER, read

#: form -> rows, scales, and whose layout it is
LAYOUTS = {
    "plain": ("BF16", "none", "the release"),
    "scaled": ("F8_E4M3", "one BF16", "the FP8 release, and most that keep the rest in INT4 or NVFP4"),
    "scaled-f32": ("F8_E4M3", "one F32", "the same with a scale that is not rounded"),
    "row-scaled": ("F8_E4M3", "one F32 a row", 'compressed-tensors, "channel"'),
    "row-scaled-int8": ("I8", "one BF16 a row", 'compressed-tensors, "channel"'),
    "nvfp4": ("U8, two values a byte", "one F8_E4M3 for 16 values, one F32", "ModelOpt"),
}


def row_formats() -> str:
    """Markdown; one row for each layout."""
    record = read(FOLDER / "formats-ple-cpu.json")
    by_form = defaultdict(list)
    for sample in record["samples"]:
        by_form[sample["form"]].append(sample)
    head = (
        "| rows | scales | whose layout | table's error | served from | tokens equal | answers | prompt, median | prompt, largest |\n"
        "|---|---|---|--:|---|--:|--:|--:|--:|\n"
    )
    return head + "".join(_row(form, samples) for form, samples in by_form.items()) + _foot(record)


def _row(form: str, samples: list[dict]) -> str:
    rows, scales, whose = LAYOUTS[form]
    cells = (
        rows,
        scales,
        whose,
        f"{100 * samples[0]['table_error']:.1f} %",
        f"{samples[0]['rows_from']}, {samples[0]['stages']} stage{'s' * (samples[0]['stages'] > 1)}",
        f"{sum(s['tokens_equal'] for s in samples)} of {sum(s['tokens'] for s in samples)}",
        f"{max(s['largest_answer'] for s in samples):.3f}",
        f"{max(s['prompt_median'] for s in samples):.3f}",
        f"{max(s['prompt_largest'] for s in samples):.3f}",
    )
    return f"| {' | '.join(cells)} |\n"


def _foot(record: dict) -> str:
    where = record["hardware"]
    return (
        "\nDifferences of log-probabilities, in nats, from transformers with the dequantized table: largest of the answers, "
        "median and largest of the prompts' positions; the first row is what two implementations in bfloat16 differ by. "
        f"{where['cpu']}, {where['cores']} cores, {record['upstream']}, commit {record['commit']}. The table's error is that "
        "of quantizing a table of normal numbers, relative to it; rows from files and from memory are equal to the last bit.\n"
    )


#: markers of docs/ampere-multigpu/loading.md
PAGE = {"row formats": row_formats}
