"""What was measured as a record, and its tables.  Imports no vLLM.

The ideal pipeline keeps every stage busy all the time: users are divided evenly over as many micro-batches as stages,
and each of them gets on as if the others were not there.  So its rate for n users is that of one micro-batch with
ceil(n / stages) users alone, measured in the same run.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, every, measured_on, named, write

#: The first record, and one for each later run of some cases; a claim compares samples of one run.
RECORD = FOLDER / "pipeline-gpu-rates.json"
RECORDS = "pipeline-gpu-rates*.json"
ALONE = "one micro-batch"
#: The part of the ideal pipeline's rate that issue 3 aims at, and that of the best fixed rule's.
AIM, BEST_AIM = 0.85, 0.95

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


def write_record(raw: Path, commit: str | None, name: str = "") -> None:
    """`commit`: what was measured, where it is not what lies here; `name`: of a record beside the first."""
    found = json.loads(raw.read_text())
    cases = by_case(found["samples"])
    stages = found["settings"]["pipeline_parallel_size"]
    claims = []
    for (context, users), rules in cases.items():
        if users < 2:
            continue
        what = f"{users} users at {context} tokens"
        ours, upstream = rules["measured"]["per_user"], rules["upstream"]["per_user"]
        best = ideal(cases, context, users, stages)
        if best is None:
            # Nobody was measured alone: then against the best of the rules that do not measure.
            most = max(sample["per_user"] for rule, sample in rules.items() if rule != "measured")
            claims.append(Claim(f"ours / best fixed rule, {what}", round(ours / most, 3), "", BEST_AIM, ">="))
        else:
            claims.append(Claim(f"ours / ideal pipeline, {what}", round(ours / best, 3), "", AIM, ">="))
        claims.append(Claim(f"ours / upstream, {what}", round(ours / upstream, 3), "", 1.0, ">="))
    settings = {"command": "python -m benchmarks.pipeline_rates run"} | found["settings"]
    write(named(RECORD, name), settings, found["samples"], claims, found["gpus"], found["hardware"], commit)


def rates() -> str:
    """Tokens/s for each user by rule, and ours over the ideal pipeline's, a part for each run."""
    found = every(RECORDS)
    return "\n".join(f"{measured_on(one)}, {one['settings']['layers']} layers.\n\n{_rates(one)}" for one in found)


def _rates(found: dict) -> str:
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
