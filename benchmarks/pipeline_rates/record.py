"""What was measured as a record, and its tables.  Imports no vLLM.

The ideal pipeline keeps every stage busy all the time: users are divided evenly over as many micro-batches as stages,
and each of them gets on as if the others were not there.  So its rate for n users is that of one micro-batch with
ceil(n / stages) users alone, measured in the same run.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, read, write

RECORD = FOLDER / "pipeline-gpu-rates.json"
ALONE = "one micro-batch"
#: The part of the ideal pipeline's rate that issue 3 aims at.
AIM = 0.85

Case = tuple[int, int]


def by_case(samples: list[dict]) -> dict[Case, dict[str, dict]]:
    """(context, users) -> rule -> sample."""
    found: dict[Case, dict[str, dict]] = {}
    for sample in samples:
        found.setdefault((sample["context"], sample["users"]), {})[sample["rule"]] = sample
    return found


def ideal(cases: dict[Case, dict[str, dict]], context: int, users: int, stages: int) -> float | None:
    """Tokens/s for each user in the ideal pipeline; None where that many users were not measured alone."""
    alone = cases.get((context, -(-users // stages)), {}).get(ALONE)
    return alone["per_user"] if alone else None


def write_record(raw: Path, commit: str | None) -> None:
    """`commit`: what was measured, where it is not what lies here."""
    found = json.loads(raw.read_text())
    cases = by_case(found["samples"])
    stages = found["settings"]["pipeline_parallel_size"]
    claims = []
    for (context, users), rules in cases.items():
        best = ideal(cases, context, users, stages)
        if users < 2 or best is None:
            continue
        what = f"{users} users at {context} tokens"
        ours, upstream = rules["measured"]["per_user"], rules["upstream"]["per_user"]
        claims += [
            Claim(f"ours / ideal pipeline, {what}", round(ours / best, 3), "", AIM, ">="),
            Claim(f"ours / upstream, {what}", round(ours / upstream, 3), "", 1.0, ">="),
        ]
    settings = {"command": "python -m benchmarks.pipeline_rates run"} | found["settings"]
    write(RECORD, settings, found["samples"], claims, found["gpus"], found["hardware"], commit)


def rates() -> str:
    """Tokens/s for each user by rule, and ours over the ideal pipeline's."""
    found = read(RECORD)
    cases, stages = by_case(found["samples"]), found["settings"]["pipeline_parallel_size"]
    rules = ["upstream", "measured", "spread", "by two", ALONE]
    rows = []
    for (context, users), samples in cases.items():
        best = ideal(cases, context, users, stages)
        rows.append(
            [
                f"{context // 1024}k",
                str(users),
                *(f"{samples[rule]['per_user']:.1f}" for rule in rules),
                f"{best:.1f}" if best else "",
                *(f"{samples[rule]['per_user'] / best:.2f}" if best else "" for rule in ("measured", "upstream")),
            ]
        )
    return table(["context", "users", *rules, "ideal", "measured / ideal", "upstream / ideal"], rows)


#: in the pipeline page
PAGE = {"two H200 at real widths": rates}
