"""The tables of docs/ampere-multigpu/host-time.md, made from the records. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.record import FOLDER, read

CPU = FOLDER / "pipeline-host-time-cpu.json"


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


def select(record: dict, stages: int, users: int) -> list[dict]:
    return [sample for sample in record["samples"] if (sample["stages"], sample["users"]) == (stages, users)]


def stages_table(stages: int, users: int) -> str:
    record = read(CPU)
    columns = [(f"stage {rank}", f"stage {rank}", "decode") for rank in range(stages)]
    return conditions(record) + by_phase(select(record, stages, users), columns)


def engine_table(stages: int, users: int) -> str:
    record = read(CPU)
    columns = [(f"{step} step", "engine core", step) for step in ("decode", "empty")]
    columns += [(f"empty step, stage {rank}", f"stage {rank}", "empty") for rank in range(stages)]
    return by_phase(select(record, stages, users), columns)


PAGE: dict[str, Callable[[], str]] = {
    "decode on three stages": lambda: stages_table(3, 3),
    "engine core and empty steps": lambda: engine_table(3, 3),
}
