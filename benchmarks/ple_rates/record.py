"""What was measured as a record, and its claims.  Imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, every, measured_on, named, write

#: The record of a run; `--name` makes another beside it, for cases that are compared among themselves.
RECORD = FOLDER / "ple-rates-gpu.json"
RECORDS = "ple-rates-gpu*.json"
PINNED, ON_DISK = "pinned, full graphs", ("shards, full graphs", "flat file, full graphs")


def claims(samples: list[dict]) -> list[Claim]:
    cases = {sample["case"]: sample for sample in samples if "failed" not in sample}
    made = []
    for case in ON_DISK:
        if case not in cases:
            continue
        own = cases[case]
        made += _waits(case, own)
        if PINNED in cases:
            made += _against_pinned(case, own, cases[PINNED])
    made += _graphs(cases)
    return made


def _against_pinned(case: str, own: dict, pinned: dict) -> list[Claim]:
    # Everything else that an engine pins is the same for both, so this is what reading from files pins.
    more = own["pinned_bytes"] - (pinned["pinned_bytes"] - pinned["table_bytes"])
    made = [Claim(f"host memory pinned for rows: {case}", round(more / 2**20, 1), "MiB", 64, "<=")]
    theirs = {(one["context"], one["cache"]): one["tokens_per_s"] for one in pinned["prefill"]}
    made += [
        Claim(
            f"prefill of {one['context']} tokens, {one['cache']} / pinned: {case}",
            round(one["tokens_per_s"] / theirs[one["context"], one["cache"]], 3),
            "",
            0.98,
            ">=",
        )
        for one in own["prefill"]
    ]
    theirs = {(one["users"], one["cache"]): one["per_user"] for one in pinned["decode"]}
    for one in own["decode"]:
        ratio = round(one["per_user"] / theirs[one["users"], one["cache"]], 3)
        made.append(Claim(f"decode, {one['users']} users, {one['cache']} / pinned: {case}", ratio, "", 0.95, ">="))
    return made


def _waits(case: str, own: dict) -> list[Claim]:
    made = []
    for one in own["decode"]:
        steps, what = one["reads"]["steps"], f"{one['users']} users, {one['cache']}: {case}"
        waited = round(1e3 * one["reads"]["row_wait_seconds"] / steps, 3)
        made.append(
            Claim(
                f"waited for rows in a decode step, {what}", waited, "ms", 1.0 if one["cache"] == "cold" else 0.2, "<="
            )
        )
        if one["cache"] == "cold":
            tokens = one["reads"]["rows"] / 16
            made.append(
                Claim(
                    f"read from the disk for a token, {what}",
                    round(one["reads"]["kernel_disk_bytes"] / tokens / 1024, 1),
                    "KiB",
                    64,
                    "<=",
                )
            )
    return made


def _graphs(cases: dict[str, dict]) -> list[Claim]:
    """Full graphs against the rest, with the table on the disk and nobody else."""
    rates = {}
    for kind in ("full graphs", "piecewise graphs", "eager"):
        own = cases.get(f"shards, {kind}")
        if own:
            rates[kind] = median(
                one["per_user"] for one in own["decode"] if one["users"] == 1 and one["cache"] == "warm"
            )
    if "full graphs" not in rates:
        return []
    return [
        Claim(
            f"decode under full graphs / {kind}, table on the disk",
            round(rates["full graphs"] / rate, 3),
            "",
            1.0,
            ">=",
        )
        for kind, rate in rates.items()
        if kind != "full graphs"
    ]


def write_record(raw: Path, commit: str | None, name: str = "") -> None:
    """`commit`: what was measured, where the raw results do not say; `name`: of a record beside the first."""
    found = json.loads(raw.read_text())
    settings = {"command": "python -m benchmarks.ple_rates run"} | found["settings"]
    made = claims(found["samples"])
    write(
        named(RECORD, name),
        settings,
        found["samples"],
        made,
        found["gpus"],
        found["hardware"],
        commit or found["commit"],
    )


def page() -> str:
    """Each run's tables: prompts, decoding, and what engines took of the host."""
    parts = (_head, _prompts, _decoding, _starts)
    return "\n".join(part(record) for record in every(RECORDS) for part in parts)


def _measured(record: dict) -> list[dict]:
    return [sample for sample in record["samples"] if "failed" not in sample]


def _head(record: dict) -> str:
    made = record["settings"]
    return (
        f"{measured_on(record)}, {made['layers']} layers at real widths; a table of {made['table_rows']:,} random rows, "
        "of which each prompt and each sampled token wants others. Cold: the page cache was dropped before.\n"
    )


def _prompts(record: dict) -> str:
    rows = [
        (
            sample["case"],
            f"{one['context']:,}",
            one["cache"],
            f"{one['tokens_per_s']:,.0f}",
            *_waited(one, 1e3, "chunk"),
        )
        for sample in _measured(record)
        for one in sample["prefill"]
    ]
    return table(("prompts", "tokens", "page cache", "tokens/s", "waited for rows a chunk", "read from the disk"), rows)


def _decoding(record: dict) -> str:
    rows = [
        (
            sample["case"],
            str(one["users"]),
            one["cache"],
            f"{one['per_user']:.1f}",
            f"{one['gpu']['forward']:.2f} ms",
            f"{one['gpu']['between']:.2f} ms",
            *_waited(one, 1e3, "step"),
        )
        for sample in _measured(record)
        for one in sample["decode"]
    ]
    heads = (
        "decoding", "users", "page cache", "tokens/s a user", "a step's forward on the GPU", "from its end to the next",
        "waited for rows a step", "read from the disk",
    )  # fmt: skip
    return table(heads, rows)


def _waited(one: dict, scale: float, what: str) -> tuple[str, str]:
    """Milliseconds a step, and what the kernel read for it; dashes for a table in memory."""
    reads = one["reads"]
    if not reads.get("steps"):
        return "–", "–"
    size = reads.get("kernel_disk_bytes", reads["disk_bytes"])
    return (
        f"{scale * reads['row_wait_seconds'] / reads['steps']:.2f} ms",
        f"{size / reads['steps'] / 1024:,.0f} KiB a {what}",
    )


def _starts(record: dict) -> str:
    rows = [
        (
            sample["case"],
            f"{sample['start_s']:.0f} s",
            f"{sample['pinned_bytes'] / 2**20:,.0f} MiB",
            # Less than nothing where other processes gave memory back meanwhile.
            f"{sample['memory_taken'] / 2**20:,.0f} MiB" if sample["memory_taken"] > 0 else "–",
        )
        for sample in _measured(record)
    ]
    return table(("engine", "started in", "pinned host memory", "less of the host's memory available after"), rows)


PAGE = {"rates on GPUs": page}
