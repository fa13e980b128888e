"""Tables of docs/ampere-multigpu/kv-cache.md about single kernels on GPUs, made from qsa-kernels-* and qsa-write-select-*."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.markdown import table
from benchmarks.record import FOLDER, measured_on, read

KERNELS, SELECTION = "qsa-kernels-*.json", "qsa-write-select-*.json"


def attention() -> str:
    """Format and case x microseconds, by kernel, with the floors; one table for each record."""
    return _cards(KERNELS, _attention)


def selection() -> str:
    """Rows and context x microseconds: ours, upstream's, the floor; then the writer's."""
    return _cards(SELECTION, _selection)


def _cards(pattern: str, card: Callable[[dict], Iterator[str]]) -> str:
    parts = ["\n".join(card(read(path))) for path in sorted(FOLDER.glob(pattern))]
    return "\n".join(parts) if parts else "Not measured on a GPU yet.\n"


def _measured(record: dict, more: str) -> str:
    return f"{measured_on(record)}; {more}.\n"


def _attention(record: dict) -> Iterator[str]:
    """Ratios are of upstream's bf16 in the same case and run."""
    settings = record["settings"]
    tiles = settings["tiles_of"] or "".join(map(str, settings["capability"]))
    copy, products = settings["copy_bytes_per_second"], settings["products_per_second"]
    yield _measured(
        record,
        f"tiles of sm_{tiles}; a large copy moves {copy / 1e9:,.0f} GB/s, a large product {2e-12 * products:,.0f} TFLOP/s; "
        "µs inside a CUDA graph, in brackets the speed against upstream's bf16",
    )
    times: dict[tuple, dict[tuple, dict]] = {}
    for row in record["samples"]:
        if "microseconds" in row:
            case = (row["mode"], row["context"], row["requests"])
            times.setdefault(case, {})[row["kernel"], row["format"]] = row
    columns = [("upstream", "bf16"), ("ours", "bf16"), ("ours", "int8"), ("ours", "fp8"), ("upstream", "fp8")]
    rows = []
    for (mode, context, requests), found in sorted(times.items()):
        base = found.get(columns[0])
        cells = []
        for column in columns:
            row = found.get(column)
            cell = f"{row['microseconds']:,.1f}" if row else "–"
            cells.append(
                cell
                + (f" ({base['microseconds'] / row['microseconds']:.2f})" if row and base and row is not base else "")
            )
        own = found.get(("ours", "int8")) or next(iter(found.values()))
        floors = f"{own['memory_microseconds']:,.1f} / {own['product_microseconds']:,.1f}"
        rows.append([mode, f"{context:,}", str(requests), *cells, floors])
    heads = [
        "",
        "context",
        "requests",
        *(f"{whose} {form}" for whose, form in columns),
        "floors, int8: memory / products",
    ]
    yield table(heads, rows)


def _selection(record: dict) -> Iterator[str]:
    yield _measured(record, "µs inside a CUDA graph")
    by: dict[tuple, dict[str, dict]] = {}
    for row in record["samples"]:
        if row["part"] == "select" and "graph_microseconds" in row:
            case = (row.get("keys", "bf16"), row["rows"], row["requests"], row["context"])
            by.setdefault(case, {})[row["what"]] = row
    rows = []
    for (keys, number, requests, context), found in sorted(by.items()):
        if "ours" not in found or ("upstream" not in found and keys == "bf16"):
            continue
        theirs, ours = found.get("upstream", {}).get("graph_microseconds"), found["ours"]["graph_microseconds"]
        beside = [f"{theirs:,.1f}", f"{ours:,.1f}", f"{ours / theirs:.2f}"] if theirs else ["–", f"{ours:,.1f}", "–"]
        rows.append(
            [keys, f"{number * requests:,}", f"{context:,}", *beside, f"{found['ours']['floor_microseconds']:,.1f}"]
        )
    heads = [
        "index keys",
        "rows",
        "context",
        "scores and selection, upstream",
        "ours",
        "ours / upstream",
        "memory floor",
    ]
    yield table(heads, rows)
    writes: dict[int, dict[tuple[str, str], float]] = {}
    for row in record["samples"]:
        if row["part"] == "write":
            writes.setdefault(row["tokens"], {})[row["what"], row["format"]] = row["graph_microseconds"]
    columns = [("upstream", "bf16"), *(("both parts", form) for form in ("bf16", "fp8", "int8"))]
    rows = [
        [f"{tokens:,}", *(f"{found[column]:.1f}" if column in found else "–" for column in columns)]
        for tokens, found in sorted(writes.items())
    ]
    yield table(["tokens written", "upstream bf16", "ours bf16", "ours fp8", "ours int8"], rows)


PAGE = {"attention kernels on GPUs": attention, "selection on GPUs": selection}
