"""What was measured as a record with its claims, and its tables.  Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.markdown import table
from benchmarks.record import FOLDER, Claim, measured_on, read, write

RECORD = FOLDER / "host-kv-gpu-rates.json"
DECODE_AIM, PREFILL_AIM = 0.97, 0.90
#: Selected rows of a token in one layer: 2048, K and V of 2 heads of 256 numbers of bf16; and 12 such layers in all.
LAYER_BYTES, LAYERS = 4 << 20, 12
#: GB/s of links that were not measured: PCIe 4.0 x16 and Thunderbolt.
LINKS = {"PCIe 4.0 x16": 25 * 1.073741824, "Thunderbolt": 3.0}
PEAK_SPREAD_MIB = 64.0


def by_case(samples: list[dict], variant: str) -> dict[tuple[int, int], dict]:
    """(context, users) -> the variant's sample."""
    return {(s["context"], s["users"]): s for s in samples if s["variant"] == variant and s["kind"] == "decode"}


def claims(samples: list[dict]) -> list[Claim]:
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
    found += [
        Claim("peak memory of a full-length prompt in a 24 GB card's share", s["peak_reserved_mib"], "MiB", 23.55 * 1024, "<=")
        for s in samples
        if s["variant"] == "share" and s["kind"] == "prompt" and s["number"] == 1 and "peak_reserved_mib" in s
    ]  # fmt: skip
    return found


def write_record(raw: Path, commit: str | None, parts: Sequence[Path] = ()) -> None:
    """`commit`: what was measured, where it is not what lies here; `parts`: of variants whose run was cut short."""
    found = json.loads(raw.read_text())
    for part in parts:
        found["samples"] += json.loads(part.read_text())["samples"]
    settings = {"command": "python -m benchmarks.host_kv_rates run"} | found["settings"]
    gpus = f"1 x {found['gpus']}" if found.get("gpus") else None
    write(RECORD, settings, found["samples"], claims(found["samples"]), gpus, found["hardware"], commit)


def rates_table(record: dict | None = None) -> str:
    """Decoding and the first token, host beside GPU."""
    record = record or read(RECORD)
    samples = record["samples"]
    host, vram = by_case(samples, "host"), by_case(samples, "vram")
    rows = [
        (
            f"{context:,}",
            str(users),
            f"{vram[context, users]['per_user']:.1f}",
            f"{host[context, users]['per_user']:.1f}",
            f"{host[context, users]['per_user'] / vram[context, users]['per_user']:.3f}",
            f"{vram[context, users]['gpu_ms']:.2f} ms",
            f"{host[context, users]['gpu_ms']:.2f} ms",
            f"{vram[context, users]['first_token_s'][-1]:.2f} s",
            f"{host[context, users]['first_token_s'][-1]:.2f} s",
        )
        for context, users in sorted(host.keys() & vram.keys())
    ]
    heads = (
        "context",
        "users",
        "tokens/s a user, K/V on the GPU",
        "in host memory",
        "ratio",
        "a step on the GPU, K/V there",
        "in host memory",
        "last first token, GPU",
        "host",
    )
    return (
        f"{measured_on(record)}, {record['settings'].get('layers', '?')} layers at real widths, one in four of them sparse.\n\n"
        + table(heads, rows)
    )


def link_table(record: dict | None = None) -> str:
    """What a token's rows take of links: the measured one, and those of cards."""
    samples = (record or read(RECORD))["samples"]
    measured = {s["way"]: median(s["gb_per_s"]) for s in samples if s["kind"] == "link"}
    token = LAYER_BYTES * LAYERS / 1e6
    rows = [
        (way, f"{speed:.1f} GB/s", f"{token / speed:.1f} ms", f"{1e3 * speed / token:.0f}")
        for way, speed in (measured | LINKS).items()
    ]
    return table(("link", "carries", "48 MiB, a token's rows in 12 layers", "tokens/s at most"), rows)
