"""Every claim of every record, met or missed. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.markdown import table
from benchmarks.record import FOLDER, SUBJECTS, Claim, read


def claims(subject: str) -> str:
    """A line for each claim of the records of one subject."""
    rows = []
    for path in sorted(FOLDER.glob(f"{subject}-*.json")):
        record = read(path)
        for claim in (Claim(**one) for one in record["claims"]):
            sign = "≥" if claim.compare == ">=" else "≤"
            rows.append(
                [
                    f"[{path.stem.removeprefix(subject + '-')}](benches/{path.name})",
                    claim.name,
                    _number(claim.value, claim.unit),
                    f"{sign} {_number(claim.aim, claim.unit)}",
                    "yes" if claim.holds else "**no**",
                    record["hardware"].get("gpus") or "CPU",
                ]
            )
    if not rows:
        return "No record yet.\n"
    return table(["record", "what", "measured", "aim", "met", "on"], rows)


def missed() -> str:
    """How many claims there are, and how many are not met."""
    found = [Claim(**one) for path in FOLDER.glob("*.json") for one in read(path)["claims"]]
    return f"{len(found)} claims, {sum(not claim.holds for claim in found)} of them not met.\n"


def _number(value: float, unit: str) -> str:
    shown = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{shown} {unit}".strip()


PAGE: dict[str, Callable[[], str]] = {"claims in all": missed} | {
    f"claims of {subject}": partial(claims, subject) for subject in SUBJECTS
}
