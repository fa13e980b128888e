"""Raw results as a record with claims, and its table.  Imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, measured_on, read, write

from .variants import AGAIN, BASE

#: Any number of cards; each is a record of its own.
RECORDS = "qsa-rates-*.json"
#: variant -> least (prefill, decode) in those of stock bf16, issue 5's aims
AIMS = {"int8 ours": (0.95, 1.0), "fp8 ours": (0.90, 1.0)}

Case = tuple[int, int]


def by_case(samples: list[dict]) -> dict[Case, dict[str, dict]]:
    """(context, users) -> variant -> sample."""
    found: dict[Case, dict[str, dict]] = {}
    for sample in samples:
        found.setdefault((sample["context"], sample["users"]), {})[sample["variant"]] = sample
    return found


def claims_of(samples: list[dict]) -> list[Claim]:
    """A claim for each case and aim that was measured beside its base."""
    claims = []
    for (context, users), variants in by_case(samples).items():
        if (base := variants.get(BASE)) is None:
            continue
        for name, aims in AIMS.items():
            if (sample := variants.get(name)) is None:
                continue
            for what, key, aim in zip(("prefill", "decode"), ("prompt_tokens_per_s", "per_user"), aims):
                said = f"{what} of {name} / {BASE}, {users} user(s) at {context} tokens"
                claims.append(Claim(said, round(sample[key] / base[key], 3), "", aim, ">="))
            if sample.get("gpu_ms") and base.get("gpu_ms"):
                said = f"decode step on the GPU of {name} / {BASE}, {users} user(s) at {context} tokens"
                claims.append(Claim(said, round(sample["gpu_ms"] / base["gpu_ms"], 3), "", 1.0, "<="))
    return claims


def write_record(raw: Path, out: Path, commit: str | None) -> None:
    """`commit`: what was measured, where it is not what lies here."""
    found = json.loads(raw.read_text())
    settings = {"command": "python -m benchmarks.kv_rates run"} | found["settings"]
    write(out, settings, found["samples"], claims_of(found["samples"]), found["gpus"], found["hardware"], commit)


def rates() -> str:
    """The table of docs/ampere-multigpu/kv-cache.md, a part for each card."""
    parts = [_card(read(path)) for path in sorted(FOLDER.glob(RECORDS))]
    return "\n".join(parts) if parts else "Not measured on a GPU yet: `python -m benchmarks.kv_rates run` is ready.\n"


def _card(record: dict) -> str:
    cases = by_case(record["samples"])
    names = list(dict.fromkeys(sample["variant"] for sample in record["samples"]))
    rows = []
    for (context, users), variants in cases.items():
        for what, key, form in (
            ("prefill", "prompt_tokens_per_s", "{:,.0f}"),
            ("decode", "per_user", "{:.1f}"),
            ("decode, ms on the GPU", "gpu_ms", "{:.3f}"),
        ):
            if not any(sample.get(key) for sample in variants.values()):
                continue
            base = variants.get(BASE)
            cells = []
            for name in names:
                sample = variants.get(name)
                cell = form.format(sample[key]) if sample and sample.get(key) else "–"
                if sample and base and sample.get(key) and base.get(key) and name not in (BASE, AGAIN):
                    cell += f" ({sample[key] / base[key]:.2f})"
                cells.append(cell)
            rows.append([f"{context // 1024}k", str(users), what, *cells])
    head = (
        f"{measured_on(record)}, {record['settings'].get('layers', '?')} layers at real widths; tokens/s, decode for each user; "
        f"in brackets, of {BASE}.\n\n"
    )
    return head + table(["context", "users", "", *names], rows)
