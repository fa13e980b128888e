"""Claims of the runs, and the page's table.  Imports no vLLM."""

from __future__ import annotations

from collections import Counter
from statistics import median

from benchmarks.cpu_scheduler import STAGES
from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, measured_on, read

RECORD = FOLDER / "pipeline-cpu-server.json"


def claims(samples: list[dict]) -> list[Claim]:
    """`samples` has one server or more of each scheduler."""
    found = []
    ours, theirs = ([s for s in samples if s["scheduler"] == name] for name in ("pipeline", "upstream"))
    for index, users in enumerate(one["users"] for one in ours[0]["together"]):
        largest = max(max(s["together"][index]["steady"], default=0) for s in ours)
        found.append(Claim(f"{users} users: largest micro-batch", largest, "requests", -(-users // STAGES), "<="))
        # Medians: a client that gets no processor reads its last tokens all at once.
        rates = [
            median(r for s in each for r in s["together"][index]["tokens_per_s_per_user"]) for each in (ours, theirs)
        ]
        found.append(Claim(f"{users} users: rate over upstream's", round(rates[0] / rates[1], 3), "x", 1.0, ">="))
    waits = [median(s["mixed"]["short_first_token_s"] for s in each) for each in (ours, theirs)]
    found.append(Claim("short behind long: wait over upstream's", round(waits[0] / waits[1], 3), "x", 0.5, "<="))
    return found


def page() -> str:
    record = read(RECORD)
    rows = []
    for sample in record["samples"]:
        for one in sample["together"]:
            sizes = ", ".join(f"{count} of {size}" for size, count in sorted(Counter(one["steady"]).items()))
            rate = f"{median(one['tokens_per_s_per_user']):.1f} tokens/s a user"
            rows.append([sample["scheduler"], f"{one['users']} users decode", sizes, rate])
        mixed = sample["mixed"]
        rows.append(
            [
                sample["scheduler"],
                "a short prompt behind a long one",
                f"first token after {mixed['short_waited_micro_batches']}",
                f"{mixed['short_first_token_s']:.2f} s; the long one {mixed['long_first_token_s']:.2f} s",
            ]
        )
    return f"{measured_on(record)}, three stages.\n\n" + table(["scheduler", "", "micro-batches", ""], rows)


PAGE = {"through the server": page}
