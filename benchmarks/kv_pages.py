"""The tables of docs/ampere-multigpu/kv-cache.md, made from the records named qsa-capacity, -quality and -rates."""

from __future__ import annotations

from benchmarks.kv_rates.record import rates
from benchmarks.markdown import table
from benchmarks.record import FOLDER, read

CAPACITY = FOLDER / "qsa-capacity.json"
QUALITY = FOLDER / "qsa-quality-cpu.json"
#: The run of the quality record that the others are measured in.
FLOOR = "bf16, other chunks and batches"


def capacity() -> str:
    """Tokens by case and format."""
    found = read(CAPACITY)
    rows: dict[tuple, list[str]] = {}
    for sample in found["samples"]:
        key = (sample["stages"], sample["gib"], sample["requests"])
        rows.setdefault(key, []).append(
            f"{sample['tokens']:,}" + (f" ({sample['ratio']:.2f}x)" if sample["format"] != "bf16" else "")
        )
    formats = dict.fromkeys(sample["format"] for sample in found["samples"])
    heads = ["stages", "GiB each", "requests", *formats]
    return table(heads, [[*map(str, key), *cells] for key, cells in rows.items()])


def quality() -> str:
    """Divergence by what is compared, and in units of the floor."""
    found = read(QUALITY)
    where = found["hardware"]
    (floor,) = (sample["mean"] for sample in found["samples"] if sample["run"] == FLOOR)
    rows = [
        [
            sample["run"],
            *(f"{sample[key]:.5f}" for key in ("mean", "median", "p99", "largest")),
            f"{sample['mean'] / floor:.2f}",
            f"{sample['same_choice']:.1%}",
        ]
        for sample in found["samples"]
    ]
    heads = ["compared", "mean", "median", "99 %", "largest", "mean, in floors", "same best token"]
    return (
        f"Measured on {where['cpu']}, {where['cores']} cores ({found['upstream']}, commit {found['commit']}), "
        f"{found['samples'][0]['positions']:,} positions, nats.\n\n{table(heads, rows)}"
    )


PAGE = {"tokens by format": capacity, "divergence by format": quality, "rates by format": rates}
