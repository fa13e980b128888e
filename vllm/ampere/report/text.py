# SPDX-License-Identifier: Apache-2.0
"""A summary for reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.ampere.finding import REFUSE
from vllm.ampere.report.style import Paint, amount, columns, size, wrapped

_VERDICT = {"ok": "green", "warnings": "yellow", "refused": "red"}
_NAMES = {
    "lm_head": "lm_head",
    "hyper_connection": "hyper-connection",
    "gdn": "GDN",
    "ple": "PLE",
    "mtp": "MTP",
    "ngram_table": "n-gram table",
}


def text(summary: dict[str, Any], paint: Paint = lambda text, colour: text) -> str:
    """All of a `summary`; `paint` colours what should catch the eye."""
    return "\n".join([*_head(summary), "", *_classes(summary), "", *_decode(summary), *_rest(summary, paint)])


def _head(s: dict[str, Any]) -> Iterator[str]:
    yield s["checkpoint"]
    yield f"{s['format']}, {s['tensors']:,} tensors, {size(s['file_bytes'])} in {s['files']} files, {s['layers']} layers"


def _name(kind: str) -> str:
    return _NAMES.get(kind, kind.replace("_", " "))


def _classes(s: dict[str, Any]) -> list[str]:
    rows = [("", "scheme", "modules", "weights", "bytes", "bits/weight")]
    for item in s["classes"]:
        for number, scheme in enumerate(item["schemes"]):
            label = scheme["scheme"] + (", loosely packed" if scheme["unused_bits"] else "")
            rows.append((_name(item["class"]) if not number else "", label, *_amounts(scheme)))
    rows.append(("body", "without n-gram table, vision, MTP", *_amounts(s["body"])))
    return columns(rows, "<<>>>>")


def _amounts(item: dict[str, Any]) -> tuple[str, str, str, str]:
    bits = f"{item['bits_per_weight']:.3f}" if item["weights"] else "–"
    return f"{item['modules']:,}", amount(item["weights"]), size(item["bytes"]), bits


def _decode(s: dict[str, Any]) -> Iterator[str]:
    step = s["decode_step"]
    yield (
        f"One decode step reads {size(step['total_bytes'])}: {size(step['dense_bytes'])} dense and "
        f"{size(step['experts_bytes'])} of experts ({step['experts_per_token']} of {step['experts']})."
    )
    yield (
        f"From tables it takes rows, {size(step['row_bytes'])}; with the whole token embedding the dense part "
        f"would be {size(step['dense_bytes'] + step['embedding_table_bytes'])}."
    )
    if flat := s.get("ngram_table_file"):
        yield f"The {flat['message']}."


def _rest(s: dict[str, Any], paint: Paint) -> Iterator[str]:
    if s["stages"]:
        yield ""
        yield from _stages(s["stages"])
    for finding in s["findings"]:
        yield ""
        refused = finding["severity"] == REFUSE
        yield paint(f"{'refused' if refused else 'warning'}: {finding['name']}", "red" if refused else "yellow")
        yield from wrapped(finding["message"], "  ")
    yield ""
    yield f"Verdict: {_verdict(s['verdict'], s['findings'], paint)}"
    if s.get("repair"):
        yield ""
        yield from _repair(s["repair"], paint)


def _verdict(word: str, found: list[dict[str, Any]], paint: Paint) -> str:
    refusals = sum(finding["severity"] == REFUSE for finding in found)
    counts = ((refusals, "refusal"), (len(found) - refusals, "warning"))
    said = ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in counts if n)
    return paint(word, _VERDICT[word]) + (f" ({said})" if said else "")


def _repair(done: dict[str, Any], paint: Paint) -> Iterator[str]:
    yield f"Written to {done['out']}, with {done['linked']} links to files that stay as they are:"
    for change in done["changes"] or [{"file": "", "change": "nothing to change"}]:
        yield from wrapped(f"{change['file']} {change['change']}".strip(), "  ")
    for finding in done["remaining"]:
        yield from wrapped(f"not repaired: {finding['name']}: {finding['where']}", "  ")
    yield f"Verdict of the repaired checkpoint: {_verdict(done['verdict'], done['remaining'], paint)}"


def _stages(stages: list[dict[str, Any]]) -> list[str]:
    rows = [("stage", "layers", "GDN", "QSA", "resident", "of it")]
    for stage in stages:
        extra = [
            f"{what} {size(stage[key])}"
            for what, key in (
                ("embedding", "embedding_bytes"),
                ("lm_head", "lm_head_bytes"),
                ("vision", "vision_bytes"),
                ("beside it a draft module, if used,", "mtp_bytes"),
                ("beside it the n-gram table,", "ngram_table_bytes"),
            )
            if stage[key]
        ]
        layers = f"{stage['first_layer']}-{stage['last_layer']}"
        kinds = f"{stage['gdn_layers']}", f"{stage['qsa_layers']}"
        rows.append((f"{stage['stage']}", layers, *kinds, size(stage["resident_bytes"]), "; ".join(extra)))
    return columns(rows, "><>>><")
