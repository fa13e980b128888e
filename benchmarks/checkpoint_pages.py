"""The tables of docs/ampere-multigpu/check.md: from its record, and from the classes of findings themselves."""

from __future__ import annotations

from benchmarks.record import FOLDER, read


def _record() -> dict:
    return read(FOLDER / "formats-check.json")


def sample() -> str:
    """The text of the recorded summary, written as the command writes it today."""
    from vllm.ampere.report import text

    return f"```\n$ vllm ampere check /models/mix -pp 3 --repair /models/repaired\n{text(_record()['settings']['summary'])}\n```\n"


def refusals() -> str:
    """Every class of finding with its message; `…` stands for the place, and for what was expected and found there."""
    from vllm.ampere.findings import REFUSE, catalogue

    rows = [
        f"| `{item.__name__}` | {'refused' if item.severity == REFUSE else 'warning'} "
        f"| {item.what}: …: expected …, found …. {item.remedy.replace('|', chr(92) + '|')} |\n"
        for item in catalogue()
    ]
    return "| name | | message |\n|---|---|---|\n" + "".join(rows)


def seconds() -> str:
    """The smallest value of each checkpoint's runs, since other work on the machine only adds."""
    record = _record()
    where, settings = record["hardware"], record["settings"]
    lines = [
        f"Processor time on {where['cpu']}, {where['cores']} cores shared with other work ({record['upstream']}, commit "
        f"{record['commit']}): the least of {settings['runs']} runs each.\n\n"
        "| checkpoint | size | tensors | headers | `vllm ampere check` | import of vLLM | headers read | checked |\n"
        "|---|---|---|---|---|---|---|---|\n"
    ]
    for name, about in settings["checkpoints"].items():
        runs = [run for run in record["samples"] if run["checkpoint"] == name]
        best = [min(run[f"{key}_cpu_s"] for run in runs) for key in ("command", "import", "read", "findings")]
        lines.append(
            f"| {about} | {runs[0]['file_bytes'] / 1e9:.0f} GB | {runs[0]['tensors']:,} "
            f"| {runs[0]['header_bytes'] / 1e6:.0f} MB | {' | '.join(f'{value:.1f} s' for value in best)} |\n"
        )
    lines.append(
        "\nThe import is that of vLLM's package, which every `vllm` command starts with. The engine's own modules are "
        f"not imported: `vllm --help`, which imports them, took {settings['vllm_help_cpu_s']:.0f} s.\n"
    )
    return "".join(lines)


PAGE = {"check sample": sample, "check refusals": refusals, "check seconds": seconds}
