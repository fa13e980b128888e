"""The tables of docs/ampere-multigpu/host-time.md, made from the records. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks import host_time
from benchmarks.record import FOLDER, measured_on, read

CPU = FOLDER / "pipeline-host-time-cpu.json"
ARRIVALS = FOLDER / "pipeline-arrivals-cpu.json"
GPUS = FOLDER / "pipeline-gpu-rates.json"


def conditions(record: dict) -> str:
    where, settings = record["hardware"], record["settings"]
    gpus = f", {where['gpus']}" if "gpus" in where else ""
    return (
        f"Measured on {where['cpu']}, {where['cores']} cores{gpus} ({record['upstream']}, commit {record['commit']}): "
        f"checkpoint {settings['checkpoint']}, {settings['tokens']} tokens for each user.\n\n"
    )


def by_phase(samples: Iterable[dict], columns: list[tuple[str, str, str]]) -> str:
    """Milliseconds a step: a row for each phase, longest first, and a column for each (heading, part, step)."""
    found = {(part, step): {} for _, part, step in columns}
    for sample in samples:
        if (sample["part"], sample["step"]) in found:
            found[sample["part"], sample["step"]][sample["phase"]] = sample["ms_per_step"]
    most = {phase: 0.0 for cells in found.values() for phase in cells}
    for cells in found.values():
        for phase, milliseconds in cells.items():
            most[phase] = max(most[phase], milliseconds)
    lines = [f"| ms a step | {' | '.join(heading for heading, _, _ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for phase in sorted(most, key=lambda phase: (phase.startswith("GPU"), -most[phase])):
        cells = [found[part, step].get(phase) for _, part, step in columns]
        lines.append(f"| {phase} | {' | '.join('' if ms is None else f'{ms:.2f}' for ms in cells)} |")
    return "\n".join(lines) + "\n"


def select(record: dict, stages: int, users: int, variant: str, number: int | None = None) -> list[dict]:
    """Samples of a round; unless said, of the one with the shortest steps: other work on the machine makes them longer."""
    if number is None:
        found = [select(record, stages, users, variant, each) for each in range(record["settings"]["rounds"])]
        return min(found, key=lambda samples: _figure(samples, "stage 0", "decode", "whole", "ms_per_step"))
    wanted = {"stages": stages, "users": users, "variant": variant, "round": number}
    return [sample for sample in record["samples"] if wanted.items() <= sample.items()]


def _figure(samples: list[dict], part: str, step: str, phase: str, figure: str) -> float:
    wanted = {"part": part, "step": step, "phase": phase}
    return next((sample[figure] for sample in samples if wanted.items() <= sample.items()), 0.0)


def engine_table(stages: int, users: int) -> str:
    """The engine core's turns and what an empty step costs each stage, as upstream has it."""
    columns = [(f"{step} step", "engine core", step) for step in ("decode", "empty")]
    columns += [(f"empty step, stage {rank}", f"stage {rank}", "empty") for rank in range(stages)]
    return by_phase(select(read(CPU), stages, users, "before"), columns)


def for_each_decode(samples: list[dict], part: str, step: str, phase: str, figure: str) -> float:
    """A total of one kind of step over the number of decode steps."""
    return _figure(samples, part, step, phase, figure) / _figure(samples, part, "decode", "whole", "count")


def cuts(samples: list[dict], stages: int) -> dict[str, float]:
    """What the two topics change, by name; some of it per decode step."""
    last, core = f"stage {stages - 1}", "engine core"
    turns = sum(for_each_decode(samples, core, step, "whole", "total_ms") for step in ("decode", "empty"))
    waits = sum(for_each_decode(samples, core, step, "wait", "total_ms") for step in ("decode", "empty"))
    return {
        "empty steps that each stage takes in, for each decode step": for_each_decode(
            samples, last, "empty", "whole", "count"
        ),
        "host time of the last stage on them, ms": for_each_decode(samples, last, "empty", "whole", "total_ms")
        - for_each_decode(samples, last, "empty", "wait", "total_ms"),
        "engine core, all but waiting for results, ms": turns - waits,
        "of which it sleeps, ms": for_each_decode(samples, core, "empty", "pause", "total_ms"),
        "tokens/s for each user": samples[0]["tokens_per_s_per_user"],
    }


def cuts_table(stages: int) -> str:
    record = read(CPU)
    columns = [(users, variant) for users in record["settings"]["users"] for variant in ("before", "now")]
    rounds = range(record["settings"]["rounds"])
    found = [[cuts(select(record, stages, *column, number), stages) for number in rounds] for column in columns]
    heads = [f"{users} user{'s' * (users > 1)}, {variant}" for users, variant in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for name in found[0][0]:
        # Every round is shown: the machine had other work.
        cells = [", ".join(f"{measured[name]:.2f}" for measured in column) for column in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def stages_table(stages: int, users: int) -> str:
    record = read(CPU)
    columns = [(f"stage {rank}", f"stage {rank}", "decode") for rank in range(stages)]
    return conditions(record) + by_phase(select(record, stages, users, "now"), columns)


def gpu_table(users: int, context: int) -> str:
    """Decode steps of two stages on GPUs under the measuring rule, from the rates of whole engines."""
    record = read(GPUS)
    wanted = {"users": users, "context": context, "rule": "measured"}
    (sample,) = (sample for sample in record["samples"] if wanted.items() <= sample.items())
    columns = [(part, part, "decode") for part in ("engine core", "stage 0", "stage 1")]
    layers = record["settings"]["layers"]
    head = f"{measured_on(record)}, {layers} layers over two stages, {users} users at {context:,} tokens.\n\n"
    return head + by_phase(host_time.rows(sample["times"]), columns)


def arrivals_table() -> str:
    """Each round's sizes: of the micro-batches that prompts started in, and of those that then decoded."""
    found: dict[tuple[int, bool], list[str]] = {}
    for sample in read(ARRIVALS)["samples"]:
        started = " + ".join(map(str, sample["started_together"]))
        decoded = " and ".join(sample["decoded_together"])
        found.setdefault((sample["users"], sample["quiet_steps"]), []).append(f"{started}, then {decoded}")
    lines = ["| users | steps sent as upstream does | empty steps kept back |", "|---|---|---|"]
    for users in dict.fromkeys(users for users, _ in found):
        cells = ["; ".join(dict.fromkeys(found[users, quiet])) for quiet in (False, True)]
        lines.append(f"| {users} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PAGE: dict[str, Callable[[], str]] = {
    "decode on three stages": lambda: stages_table(3, 1),
    "engine core and empty steps": lambda: engine_table(3, 1),
    "cuts": lambda: cuts_table(3),
    "arrivals": arrivals_table,
    "two stages on GPUs": lambda: gpu_table(2, 8192),
}
