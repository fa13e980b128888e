"""The tables of the pipeline page, from the committed predictions. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.markdown import table
from benchmarks.record import FOLDER, read

RECORD = FOLDER / "pipeline-model-3090.json"
#: in place of a number of micro-batches
MEASURED = "measured"
ARRANGEMENTS = ("merged", "stock", "spread")


def _samples(case: str) -> Iterator[dict]:
    return (sample for sample in read(RECORD)["samples"] if sample["case"] == case)


def _middle(published: list[float]) -> float:
    return sum(published) / len(published)


def _off(value: float, published: float) -> str:
    return f"{value:.1f} ({100 * (value / published - 1):+.0f}%)"


def parameters() -> str:
    rows = [
        [
            "each its own" if one["own_bytes"] else "the counted checkpoint for both",
            f"{one['efficiency']:.2f}",
            f"{one['fixed_ms']:.2f} ms",
            f"{one['tflops']:.1f}",
            *(f"{rate:.1f}" for rate in one["singles"].values()),
        ]
        for one in read(RECORD)["settings"]["calibrations"]
    ]
    heads = ["bytes", "share of 936 GB/s", "fixed", "TFLOP/s of prefill", "six cards, 57 published", "three cards, 80"]
    return table(heads, rows)


def decode(own_bytes: bool) -> str:
    found: dict[tuple[str, int], dict[str, dict]] = {}
    for sample in _samples("decode"):
        if sample["own_bytes"] == own_bytes:
            found.setdefault((sample["machine"], sample["users"]), {})[sample["arrangement"]] = sample
    rows = []
    for (machine, users), by in found.items():
        published = by["merged"]["published"]
        low, high = published
        cells = [_off(by[name]["per_user"], _middle(published)) for name in ARRANGEMENTS]
        shown = f"{low:.0f}" if low == high else f"{low:.1f} to {high:.1f}"
        cells[1] += f" in {by['stock']['micro_batches']:.0f}"
        cells[2] += f" in {by['spread']['micro_batches']:.0f}"
        rows.append([machine, str(users), shown, *cells])
    return table(["machine", "users", "published", "one micro-batch", "as stock arranges them", "spread"], rows)


def prefill() -> str:
    rows = [
        [sample["machine"], sample["what"], f"{sample['published']:g} s", _off(sample["seconds"], sample["published"])]
        for sample in _samples("prefill")
        if sample["own_bytes"]
    ]
    return table(["machine", "prompt", "published", "model, seconds"], rows)


def h200() -> str:
    rows = [
        [str(sample["users"]), f"{sample['measured']:.0f}", _off(sample["per_user"], sample["measured"])]
        for sample in _samples("two H200")
    ]
    return table(["users", "measured", "model"], rows)


def wide() -> str:
    cells: dict[tuple[int, int], list[str]] = {}
    for sample in _samples("two H200 at real widths"):
        shown = [f"{sample['measured']:.1f}", _off(sample["per_user"], sample["measured"])]
        cells.setdefault((sample["context"], sample["users"]), []).extend(shown)
    rows = [[f"{context >> 10}k", str(users), *by] for (context, users), by in cells.items()]
    return table(["context", "users", "spread", "model", "measuring", "model"], rows)


def host() -> str:
    rates: dict[tuple[str, int, float], dict[int | str, float]] = {}
    for sample in _samples("host"):
        key = (sample["machine"], sample["users"], sample["host_ms"])
        rates.setdefault(key, {})[sample["groups"]] = sample["per_user"]
    numbers = sorted({groups for by in rates.values() for groups in by if groups != MEASURED})
    rows = []
    for (machine, users, host_ms), by in rates.items():
        best = max(rate for groups, rate in by.items() if groups != MEASURED)
        cells = ["" if groups not in by else _bold(by[groups], by[groups] == best) for groups in numbers]
        # A record from before the scheduler measured has no such samples.
        ours = [f"{by[MEASURED]:.1f}"] if MEASURED in by else []
        rows.append([f"{machine}, {users} users", f"{host_ms:g} ms", *cells, *ours])
    heads = ["ours"] if any(MEASURED in by for by in rates.values()) else []
    return table(["", "host time", *map(str, numbers), *heads], rows)


def _bold(value: float, bold: bool) -> str:
    return f"**{value:.1f}**" if bold else f"{value:.1f}"


def partition() -> str:
    rows = [
        [
            ", ".join(map(str, sample["layers"])),
            f"{sample['per_user']:.1f}",
            f"{100 * max(sample['idle']):.0f}%",
            f"{100 * sample['idle'][-1]:.0f}%",
        ]
        for sample in _samples("partition")
    ]
    return table(["layers", "tok/s each", "idle, idlest stage", "idle, last stage"], rows)


def schedulers() -> str:
    """Stock against ours; even layers with 3.7 ms of host time, then balanced ones with 2 ms."""
    found: dict[str, list[str]] = {}
    for name in ("pipeline-model-schedulers.json", "pipeline-model-schedulers-balanced.json"):
        for sample in read(FOLDER / name)["samples"]:
            users = sample["users"] > 1 and sample["situation"].split()[0] == str(sample["users"])
            shown = f"{sample['per_user']:.1f}" if users else f"{sample['last_first_token_s']:.1f} s"
            found.setdefault(sample["situation"], []).append(shown)
    heads = ["", "stock", "ours", "stock, balanced, 2 ms", "ours, balanced, 2 ms"]
    rows = [[situation, *cells] for situation, cells in found.items() if not situation.startswith("1 at")]
    return table(heads, rows)


PAGE: dict[str, Callable[[], str]] = {
    "model parameters": parameters,
    "decode with own bytes": lambda: decode(True),
    "decode with the counted bytes": lambda: decode(False),
    "prefill waits": prefill,
    "two H200": h200,
    "model at real widths": wide,
    "host time and micro-batches": host,
    "layers of the last stage": partition,
    "schedulers side by side": schedulers,
}
