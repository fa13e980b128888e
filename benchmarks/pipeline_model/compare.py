"""Any scheduler classes side by side, on the same simulated stages and situations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from . import results, workloads
from .cases import ARRIVALS_MS, HOST
from .published import SIX, THREE, Calibration, Machine


def machine_of(stages: int) -> Machine:
    known = {machine.serving.stages: machine for machine in (THREE, SIX)}
    if stages not in known:
        raise SystemExit(f"no published machine has {stages} stages; {', '.join(map(str, known))} do")
    return known[stages]


def situations(machine: Machine) -> dict[str, dict]:
    """Situation -> arguments of its workload; `lengths` marks uncached prompts, `users` those that decode."""
    most = machine.serving.max_num_seqs
    return {
        **{f"{users} decode at 250k": {"users": users} for users in range(1, most + 1)},
        "3k behind 230k": {"lengths": [230_000, 3_000], "arrivals_ms": [0.0, 1000.0]},
        "3k behind 230k while 2 decode": {
            "lengths": [1_500, 1_500, 230_000, 3_000],
            "arrivals_ms": [0.0, 1.0, 2000.0, 3000.0],
            "output": 256,
        },
    }


def compare(calibration: Calibration, machine: Machine, schedulers: Sequence[str]) -> Iterator[dict]:
    """A sample for each situation and scheduler."""
    cost = calibration.cost(machine)
    for name, what in situations(machine).items():
        for scheduler in schedulers:
            serving = replace(machine.serving, scheduler=scheduler)
            if "users" in what:
                trace = workloads.decoding(serving, cost, HOST, arrivals_ms=ARRIVALS_MS, **what)
            else:
                trace = workloads.prompts(serving, cost, HOST, **what)
            last = list(trace.served.values())[-1]
            yield {"situation": name, "scheduler": scheduler, "last_first_token_s": results.first_token_s(last)} | (
                results.summary(trace)
            )
