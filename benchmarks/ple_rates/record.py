"""What was measured as a record, and its claims.  Imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.record import FOLDER, Claim, write

RECORD = FOLDER / "ple-rates-gpu.json"
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


def write_record(raw: Path, commit: str | None) -> None:
    """`commit`: what was measured, where the raw results do not say."""
    found = json.loads(raw.read_text())
    settings = {"command": "python -m benchmarks.ple_rates run"} | found["settings"]
    made = claims(found["samples"])
    write(RECORD, settings, found["samples"], made, found["gpus"], found["hardware"], commit or found["commit"])
