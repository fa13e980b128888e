"""What was measured as a record with its claims, and its tables.  Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, every, measured_on, named, read, write

#: The first record, and one for each later run that added cases; a claim compares samples of one run.
RECORD = FOLDER / "host-kv-gpu-rates.json"
RECORDS = "host-kv-gpu-rates*.json"
DECODE_AIM, PREFILL_AIM = 0.97, 0.90
#: Selected rows of a token in one layer: 2048, K and V of 2 heads of 256 numbers of bf16; and 12 such layers in all.
LAYER_BYTES, LAYERS = 4 << 20, 12
#: GB/s of links that were not measured: PCIe 4.0 x16 and Thunderbolt.
LINKS = {"PCIe 4.0 x16": 25 * 1.073741824, "Thunderbolt": 3.0}
PEAK_SPREAD_MIB = 64.0
#: Bytes of the rows that a token selects in one layer, by the end of a variant's name: 2048 times 2 KiB of bf16, or nine lines
#: of 128 bytes. A link's packets add a seventh to lines of 128 bytes.
ROWS_BYTES = {"": LAYER_BYTES, "-int8": 2048 * 1152}
LINK_AIM = 1.25


def by_case(samples: list[dict], variant: str) -> dict[tuple[int, int], dict]:
    """(context, users) -> the variant's sample."""
    return {(s["context"], s["users"]): s for s in samples if s["variant"] == variant and s["kind"] == "decode"}


def over_link(sample: dict, settings: dict, suffix: str) -> tuple[float, float] | None:
    """MiB that crossed PCIe for a decoded token, and how many times that is what its rows are; None where nothing counts it.

    Args:
        sample: of decoding, K/V in host memory
        settings: of its run; one in four of its layers is sparse
        suffix: of the variant's name
    """
    if not sample.get("pcie_rx_gb_per_s") or "layers" not in settings:
        return None
    crossed = sample["pcie_rx_gb_per_s"] * 1e6 * sample["gap_ms"] / sample["users"]
    return crossed / 2**20, crossed / (settings["layers"] // 4 * ROWS_BYTES[suffix])


def claims(samples: list[dict], settings: dict) -> list[Claim]:
    """What was aimed at, as far as it was measured."""
    found = []
    for suffix in ("", "-int8"):
        host, vram = by_case(samples, f"host{suffix}"), by_case(samples, f"vram{suffix}")
        for case in sorted(host.keys() & vram.keys()):
            what = f"{case[1]} users at {case[0]} tokens{suffix.replace('-', ', ')}"
            rate = host[case]["per_user"] / vram[case]["per_user"]
            found.append(Claim(f"decode, host / GPU, {what}", round(rate, 4), "", DECODE_AIM, ">="))
            if host[case].get("gpu_ms") and vram[case].get("gpu_ms"):
                rate = vram[case]["gpu_ms"] / host[case]["gpu_ms"]
                found.append(Claim(f"a decode step on the GPU, {what}", round(rate, 4), "", DECODE_AIM, ">="))
            if crossed := over_link(host[case], settings, suffix):
                found.append(
                    Claim(f"over PCIe for a token, times its rows, {what}", round(crossed[1], 3), "", LINK_AIM, "<=")
                )
            if case[1] == 1:
                rate = vram[case]["first_token_s"][-1] / host[case]["first_token_s"][-1]
                found.append(Claim(f"prefill, host / GPU, {what}", round(rate, 4), "", PREFILL_AIM, ">="))
    beside = {
        s["arena_bytes"]: s["peak_allocated_mib"] - s["arena_bytes"] / 2**20
        for s in samples
        if s["kind"] == "prompt" and s["variant"].startswith("arena-") and "peak_allocated_mib" in s
    }
    if len(beside) > 1:
        spread = max(beside.values()) - min(beside.values())
        found.append(
            Claim("peak memory beside the arena, spread over arenas", round(spread, 1), "MiB", PEAK_SPREAD_MIB, "<=")
        )
    # Of all prompts: compiling, which the first one does, takes time and no memory.
    peaks = [s["peak_reserved_mib"] for s in samples if s["variant"] == "share" and "peak_reserved_mib" in s]
    if peaks:
        what = "peak memory of a full-length prompt in a 24 GB card's share"
        found.append(Claim(what, max(peaks), "MiB", 23.55 * 1024, "<="))
    return found


def write_record(raw: Path, commit: str | None, parts: Sequence[Path] = (), name: str = "") -> None:
    """The record of a run.

    Args:
        commit: what was measured, where it is not what lies here
        parts: of variants whose run was cut short
        name: of a run whose cases are in no other record; its record stands beside the first
    """
    found = json.loads(raw.read_text())
    for part in parts:
        found["samples"] += json.loads(part.read_text())["samples"]
    settings = {"command": "python -m benchmarks.host_kv_rates run"} | found["settings"]
    gpus = f"1 x {found['gpus']}" if found.get("gpus") else None
    found_claims = claims(found["samples"], settings)
    write(named(RECORD, name), settings, found["samples"], found_claims, gpus, found["hardware"], commit)


def rates_table(records: Sequence[dict] | None = None) -> str:
    """Decoding and the first token, host beside GPU, a part for each run."""
    parts = []
    for record in records or every(RECORDS):
        rows = [
            (
                f"{context:,}",
                str(users),
                form,
                *_pair(host[context, users], vram[context, users]),
                _crossed(over_link(host[context, users], record["settings"], suffix)),
            )
            for form, suffix in (("bf16", ""), ("int8", "-int8"))
            for host, vram in [
                (by_case(record["samples"], f"host{suffix}"), by_case(record["samples"], f"vram{suffix}"))
            ]
            for context, users in sorted(host.keys() & vram.keys())
        ]
        if rows:
            chunk = record["settings"].get("max_num_batched_tokens", 0)
            parts.append(_head(record, f"; prompts in chunks of {chunk:,} tokens") + table(_HEADS, rows))
    return "\n".join(parts)


_HEADS = (
    "context",
    "users",
    "rows",
    "tokens/s a user, K/V on the GPU",
    "in host memory",
    "ratio",
    "a step on the GPU, K/V there",
    "in host memory",
    "ratio",
    "last first token, GPU",
    "host",
    "over PCIe for a token",
)


def _pair(host: dict, vram: dict) -> tuple[str, ...]:
    return (
        f"{vram['per_user']:.1f}",
        f"{host['per_user']:.1f}",
        f"{host['per_user'] / vram['per_user']:.3f}",
        f"{vram['gpu_ms']:.2f} ms",
        f"{host['gpu_ms']:.2f} ms",
        f"{vram['gpu_ms'] / host['gpu_ms']:.3f}",
        f"{vram['first_token_s'][-1]:.2f} s",
        f"{host['first_token_s'][-1]:.2f} s",
    )


def _crossed(found: tuple[float, float] | None) -> str:
    return f"{found[0]:.1f} MiB, {found[1]:.2f} times its rows" if found else "–"


def _head(record: dict, more: str = "") -> str:
    layers = record["settings"].get("layers", "?")
    return f"{measured_on(record)}, {layers} layers at real widths, one in four of them sparse{more}.\n\n"


def peaks_table(records: Sequence[dict] | None = None) -> str:
    """Memory of the device that a long prompt took at most, by arena; and in a 24 GB card's share."""
    parts = []
    for record in records or every(RECORDS):
        most: dict[str, dict] = {}
        for sample in record["samples"]:
            if sample["kind"] == "prompt" and "peak_allocated_mib" in sample:
                before = most.get(sample["variant"], sample)
                most[sample["variant"]] = max(before, sample, key=lambda one: one["peak_allocated_mib"])
        rows = [
            (
                "of a 24 GB card's share" if name == "share" else "of a GPU",
                f"{one['tokens']:,}",
                f"{one['arena_bytes'] / 2**20:.0f} MiB",
                f"{one['peak_allocated_mib']:,.0f} MiB",
                "–" if name == "share" else f"{one['peak_allocated_mib'] - one['arena_bytes'] / 2**20:,.0f} MiB",
                f"{one['peak_reserved_mib']:,.0f} MiB",
                f"{one['seconds']:.1f} s",
            )
            for name, one in most.items()
        ]
        if rows:
            heads = ("prompt", "tokens", "arena", "allocated at most", "of it beside the arena", "reserved", "took")
            parts.append(_head(record) + table(heads, rows))
    return "\n".join(parts)


def link_table(record: dict | None = None) -> str:
    """What a token's rows take of links: the measured one, by the first record, and those of cards."""
    samples = (record or read(RECORD))["samples"]
    measured = {s["way"]: median(s["gb_per_s"]) for s in samples if s["kind"] == "link"}
    token = LAYER_BYTES * LAYERS / 1e6
    rows = [
        (way, f"{speed:.1f} GB/s", f"{token / speed:.1f} ms", f"{1e3 * speed / token:.0f}")
        for way, speed in (measured | LINKS).items()
    ]
    return table(("link", "carries", "48 MiB, a token's rows in 12 layers", "tokens/s at most"), rows)
