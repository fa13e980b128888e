"""What was measured as a record, its claims and its tables.  Imports no vLLM."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from benchmarks.markdown import table
from benchmarks.record import FOLDER, ROOT, Claim, read, write

from . import pages

RECORD = FOLDER / "ple-reads-cpu.json"


def pick(samples: list[dict], **wanted) -> dict:
    """The one sample with these values."""
    (found,) = (one for one in samples if all(one.get(key) == value for key, value in wanted.items()))
    return found


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def claims(samples: list[dict]) -> list[Claim]:
    made = []
    for rows in dict.fromkeys(one["rows"] for one in samples if one["what"] == "flatten"):
        for store in ("shards", "flat"):
            cold, warm = (
                pick(samples, what="decode", users=1, store=store, rows=rows, cache=cache) for cache in ("cold", "warm")
            )
            what = f"{store}, {rows}"
            made += [
                Claim(f"read from the disk for a decoded token, cold: {what}", cold["kib_per_token"], "KiB", 64, "<="),
                Claim(
                    f"the same beside the pages that its rows lie on: {what}",
                    cold["kib_per_token"],
                    "KiB",
                    cold["counted_kib_per_token"],
                    "<=",
                ),
                Claim(
                    f"waited in a decode step, median, cold: {what}",
                    round(percentile(cold["ms"], 0.5), 3),
                    "ms",
                    1,
                    "<=",
                ),
                Claim(
                    f"waited in a decode step, median, warm: {what}",
                    round(percentile(warm["ms"], 0.5), 3),
                    "ms",
                    0.2,
                    "<=",
                ),
            ]
    held = [one for one in samples if one["what"] == "memory"]
    made.append(
        Claim("host memory locked, most of all stores", max(one["locked_bytes"] for one in held), "bytes", 0, "<=")
    )
    wrong = pick(samples, what="published size")["wrong"]
    made.append(Claim("wrong rows of a table of the published size", wrong, "rows", 0, "<="))
    return made


def write_record(out: Path, settings: dict, samples: list[dict]) -> None:
    write(out, {"command": "python -m benchmarks.ple_reads"} | settings, samples, claims(samples))


def _table(made: Callable[[list[dict]], str]) -> Callable[[], str]:
    def render() -> str:
        found = read(RECORD)
        where = found["hardware"]
        foot = (
            f"\n{where['cpu']}, {where['cores']} cores with a load of {found['settings']['load']:.1f} from others, a virtual "
            f"disk ({found['upstream']}, commit {found['commit']}); {found['settings']['table_rows']:,} random rows.\n"
        )
        return made(found["samples"]) + foot

    return render


def decode(samples: list[dict]) -> str:
    rows = []
    for one in samples:
        if one["what"] != "decode":
            continue
        rows.append(
            [
                one["store"],
                one["rows"],
                str(one["users"]),
                one["cache"],
                f"{one['kib_per_token']:,.0f} KiB",
                f"{percentile(one['ms'], 0.5):.2f} ms",
                f"{percentile(one['ms'], 0.99):.2f} ms",
            ]
        )
    heads = ["store", "rows", "users", "page cache", "read from the disk for a token", "a step, median", "99 %"]
    return table(heads, rows)


def bounds(samples: list[dict]) -> str:
    rows = []
    for form, (size, scale) in pages.FORMS.items():
        for store in ("shards", "flat"):
            least, most = pages.kib_per_token(form, store)
            shares = pages.crossings(size) if store == "shards" else (0, 0)
            cold = pick(samples, what="decode", users=1, store=store, rows=form, cache="cold")
            rows.append(
                [
                    store,
                    form,
                    f"{size + scale} bytes" if store == "flat" or not scale else f"{size} and {scale} bytes",
                    "none" if not shares[1] else f"{shares[0]:.1%} to {shares[1]:.1%}",
                    f"{least:.1f} KiB" if least == most else f"{least:.1f} to {most:.1f} KiB",
                    f"{cold['kib_per_token']:.1f} KiB",
                ]
            )
    return table(["store", "rows", "a row", "rows on two pages", "pages of a token's 16 rows", "measured"], rows)


def chunks(samples: list[dict]) -> str:
    rows = []
    for one in samples:
        if one["what"] == "chunk":
            took = mean(one["ms"])
            rows.append([one["store"], one["rows"], one["cache"], f"{took:.0f} ms", f"{one['tokens'] / took:,.0f}"])
    return table(["store", "rows", "page cache", "2048 tokens", "thousand tokens/s"], rows)


def memory(samples: list[dict]) -> str:
    rows = [
        [
            one["store"],
            one["rows"],
            f"{one['open_ms']:.0f} ms",
            f"{one['locked_bytes']} B",
            f"{one['resident_bytes'] / 1e6:.0f} MB, {one['of_which_buffer'] / 1e6:.0f} MB of it the buffer",
        ]
        for one in samples
        if one["what"] == "memory"
    ]
    load = pick(samples, what="load")
    rate = load["bytes"] / load["seconds"]
    took = 320_001_536 * 320 / rate
    note = f"\nLoading a table instead: {rate / 1e9:.1f} GB/s from the same disk, by which the published 102.4 GB take {took:.0f} s.\n"
    return table(["store", "rows", "opened in", "locked", "resident after all steps, files' pages apart"], rows) + note


def written(samples: list[dict]) -> str:
    rows = [
        [
            one["rows"],
            f"{one['of_rows'] / 1e9:.2f} GB",
            f"{one['bytes'] / 1e9:.2f} GB",
            f"{one['seconds']:.0f} s",
            f"{one['verify_seconds']:.0f} s",
        ]
        for one in samples
        if one["what"] == "flatten"
    ]
    return table(["rows", "in shards", "flat file", "written in", "verified in"], rows)


def counters() -> str:
    """What ``/metrics`` has, from the one place where it is named; read, not imported, like everything here."""
    tree = ast.parse((ROOT / "vllm/v1/metrics/ngram_table.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [target.id for target in node.targets] == ["NAMES"]
    )
    return table(["counter", ""], [[f"`vllm:ngram_table_{name}_total`", what] for name, what in names.items()])


#: markers of docs/ampere-multigpu/ngram-table.md
PAGE = {
    "counters of reads": counters,
    "decode steps": _table(decode),
    "pages of a token": _table(bounds),
    "chunks of prompts": _table(chunks),
    "memory and start": _table(memory),
    "flat files": _table(written),
}
