"""Any scheduler classes side by side, on the same simulated stages and situations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from . import results, workloads
from .cases import ARRIVALS_MS, LONG_ANSWER, TAIL
from .configs import UPSTREAM_ASYNC
from .cost import StageCost
from .pipeline import Overheads
from .published import SIX, THREE, Machine


def machine_of(stages: int) -> Machine:
    known = {machine.serving.stages: machine for machine in (THREE, SIX)}
    if stages not in known:
        raise SystemExit(f"no published machine has {stages} stages; {', '.join(map(str, known))} do")
    return known[stages]


def situations(machine: Machine) -> dict[str, dict]:
    """Situation -> arguments of its workload; `lengths` marks uncached prompts, `users` those that decode."""
    most = machine.serving.max_num_seqs
    found: dict[str, dict] = {}
    for users in range(1, most + 1):
        decoding = {"users": users, "tail": TAIL, "output": LONG_ANSWER}
        found[f"{users} at 250k, together"] = decoding | {"arrivals_ms": ARRIVALS_MS}
        found[f"{users} at 250k, over a second"] = decoding | {"arrivals_ms": (0.0, 1000.0)}
    return found | {
        f"{most} at 250k, uncached ends": {"users": most, "output": LONG_ANSWER, "arrivals_ms": ARRIVALS_MS},
        "3k behind 230k": {"lengths": [230_000, 3_000], "arrivals_ms": [0.0, 1000.0]},
        "3k behind 230k while one decodes": {
            "lengths": [1_500, 230_000, 3_000],
            "arrivals_ms": [0.0, 2000.0, 3000.0],
            "outputs": [256, 1, 1],
        },
    }


def compare(
    cost: StageCost, host: Overheads, machine: Machine, schedulers: Sequence[str], additional: Mapping[str, object]
) -> Iterator[dict]:
    """A sample for each situation and scheduler, upstream's first; `additional` is `--additional-config` of the rest."""
    for name, what in situations(machine).items():
        for scheduler in (UPSTREAM_ASYNC, *schedulers):
            serving = replace(machine.serving, scheduler=scheduler)
            if scheduler != UPSTREAM_ASYNC:
                serving = replace(serving, additional=tuple(additional.items()))
            run = workloads.decoding if "users" in what else workloads.prompts
            trace = run(serving, cost, host, **what)
            last = list(trace.served.values())[-1]
            yield {"situation": name, "scheduler": scheduler, "last_first_token_s": results.first_token_s(last)} | (
                results.summary(trace)
            )
