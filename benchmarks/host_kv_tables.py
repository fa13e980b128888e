"""Tables of the page about K/V in host memory.  Imports no vLLM."""

from __future__ import annotations

from benchmarks.host_kv_rates.record import link_table, peaks_table, rates_table
from benchmarks.markdown import table
from benchmarks.record import FOLDER, read


def capacity_table() -> str:
    """By stages and memory; a request holds state blocks beside those of its tokens."""
    heads = (
        "cards", "layers", "KV cache a card", "block", "tokens, one request", "requests of 262,144",
        "host memory, bf16", "int8", "tokens with K/V on the GPUs", "tokens, index keys in fp8",
    )  # fmt: skip
    rows = [
        (
            str(s["stages"]),
            s["partition"],
            f"{s['mb']} MB",
            f"{s['block_tokens']:,}",
            f"{s['tokens']:,}",
            str(s["full_contexts"]),
            f"{s['host_gib_bf16']:.1f} GiB",
            f"{s['host_gib_int8']:.1f} GiB",
            f"{s['tokens_in_vram']:,}",
            f"{s['tokens_fp8_index_keys']:,}",
        )
        for s in read(FOLDER / "host-kv-capacity.json")["samples"]
    ]
    return table(heads, rows)


def soak_table() -> str:
    """The soak's record in a few lines."""
    record = read(FOLDER / "host-kv-soak-cpu.json")
    samples, settings = record["samples"], record["settings"]
    rows = [
        ("minutes", f"{samples[-1]['seconds'] / 60:.0f}"),
        ("stages", str(settings["stages"])),
        ("requests ended, aborted", f"{sum(s['ended'] for s in samples)}, {sum(s['aborted'] for s in samples)}"),
        *((claim["name"], f"{claim['value']:g} {claim['unit']}") for claim in record["claims"]),
    ]
    return table(("soak on a CPU", ""), rows)


PAGE = {
    "capacity": capacity_table,
    "soak": soak_table,
    "rates on GPUs": rates_table,
    "links": link_table,
    "peaks on GPUs": peaks_table,
}
