"""What the programs about K/V in host memory make of their samples."""

from __future__ import annotations

import json

import pytest

from benchmarks import host_kv_capacity, host_kv_soak
from benchmarks.host_kv_rates import record
from benchmarks.host_kv_rates.variants import VARIANTS


def decoded(variant: str, rate: float, first: float, users: int = 1) -> dict:
    return {
        "variant": variant,
        "kind": "decode",
        "context": 4096,
        "users": users,
        "per_user": rate,
        "first_token_s": [first / 2, first],
    }


def test_claims_compare_each_case_of_the_pair():
    samples = [decoded("vram", 200.0, 0.9), decoded("host", 196.0, 1.0), decoded("vram", 150.0, 3.6, users=4)]
    decode, prefill = record.claims(samples, {})
    assert (decode.value, decode.aim, decode.holds) == (0.98, 0.97, True)
    assert (prefill.value, prefill.aim, prefill.holds) == (0.9, 0.90, True)
    assert "4 users" not in decode.name


def test_peak_memory_is_compared_without_the_arena():
    def prompt(mib: int, allocated: float) -> dict:
        bytes_ = mib << 20
        return {"variant": f"arena-{mib}", "kind": "prompt", "arena_bytes": bytes_, "peak_allocated_mib": allocated}

    (claim,) = record.claims([prompt(24, 1024.0), prompt(384, 1400.0)], {})
    assert (claim.value, claim.holds) == (16.0, True)


def test_the_share_of_a_card_is_what_any_prompt_took_at_most():
    samples = [
        {"variant": "share", "kind": "prompt", "tokens": 262_128, "arena_bytes": 96 << 20, "seconds": 50.0}
        | {"peak_allocated_mib": 23_000.0, "peak_reserved_mib": reserved}
        for reserved in (24_200.0, 23_170.0)
    ]
    (claim,) = record.claims(samples, {})
    assert (claim.value, claim.holds) == (24_200.0, False)
    measured = {"samples": samples, "hardware": {"cpu": "a CPU"}, "upstream": "vllm", "commit": "abc", "settings": {}}
    assert "| of a 24 GB card's share | 262,128 | 96 MiB | 23,000 MiB | – | 24,200 MiB |" in record.peaks_table(
        [measured]
    )


def test_a_failed_variant_claims_nothing():
    assert not record.claims([{"variant": "host", "kind": "failed", "status": "1"}], {})


def test_tables():
    samples = [decoded("vram", 200.0, 0.9) | {"gpu_ms": 4.0}, decoded("host", 196.0, 1.0) | {"gpu_ms": 5.0}]
    on_the_gpu = record.claims(samples, {})[1]
    assert (on_the_gpu.value, on_the_gpu.holds) == (0.8, False)
    measured = {"samples": samples, "hardware": {"cpu": "a CPU"}, "upstream": "vllm", "commit": "abc", "settings": {}}
    shown = record.rates_table([measured, measured | {"samples": []}])
    assert "| 4,096 | 1 | bf16 | 200.0 | 196.0 | 0.980 | 4.00 ms | 5.00 ms | 0.800 | 0.90 s | 1.00 s |" in shown
    assert shown.count("Measured on") == 1
    link = record.link_table({"samples": [{"kind": "link", "way": "copy engine", "gb_per_s": [50.0, 52.0, 51.0]}]})
    assert "| copy engine | 51.0 GB/s | 1.0 ms | 1013 |" in link
    assert "| Thunderbolt | 3.0 GB/s | 16.8 ms | 60 |" in link


def test_a_variant_that_was_cut_short_is_recorded_as_far_as_it_came(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORD", tmp_path / "host-kv-gpu-rates.json")
    raw, part = tmp_path / "raw.json", tmp_path / "raw.vram.json"
    raw.write_text(
        json.dumps({"samples": [decoded("host", 196.0, 1.0)], "settings": {}, "hardware": {}, "gpus": "card"})
    )
    part.write_text(json.dumps({"samples": [decoded("vram", 200.0, 0.9)]}))
    record.write_record(raw, "abc", [part])
    made = json.loads((tmp_path / "host-kv-gpu-rates.json").read_text())
    assert [sample["variant"] for sample in made["samples"]] == ["host", "vram"] and len(made["claims"]) == 2


def test_what_crosses_the_link_is_compared_with_what_rows_are():
    """A step of 4 ms at 10 GB/s for two users is 20 MB each; in two sparse layers rows of bf16 are 8 MiB."""
    sample = {"variant": "host", "kind": "decode", "context": 1, "users": 2, "per_user": 1.0, "first_token_s": [1.0]}
    sample |= {"pcie_rx_gb_per_s": 10.0, "gap_ms": 4.0}
    (_, claim) = record.claims([sample, sample | {"variant": "vram"}], {"layers": 8})
    assert claim.name.startswith("over PCIe") and claim.value == 2.384 and not claim.holds
    assert record.over_link(sample, {"layers": 8}, "-int8")[1] == pytest.approx(20e6 / (2 * 2048 * 1152))
    # Without a counter nothing is claimed.
    assert record.over_link(sample | {"pcie_rx_gb_per_s": None}, {"layers": 8}, "") is None


def test_pairs_of_variants_differ_in_the_place_of_rows_alone():
    for host, vram in (("host", "vram"), ("host-int8", "vram-int8")):
        left, right = dict(VARIANTS[host].engine), dict(VARIANTS[vram].engine)
        assert left.pop("qsa_config")["kv_offload"]
        assert left == right


@pytest.mark.parametrize(
    ("change", "failing"),
    [({}, 0), ({"free_blocks": 46}, 1), ({"same_answer": False}, 1), ({"resident_mb": 1100.0}, 1)],
)
def test_a_soak_fails_on_what_it_is_about(change, failing):
    fine = {"free_blocks": 47, "same_answer": True, "resident_mb": 1000.0}
    samples = [dict(fine) for _ in range(20)] + [fine | change] * 6
    assert sum(not claim.holds for claim in host_kv_soak.claims(samples, 47)) == (failing if change else 0)


def test_capacity_of_a_case_is_the_planners():
    row = host_kv_capacity.case(3, None, 400)
    assert (row["tokens"], row["full_contexts"], row["tokens_in_vram"]) == (1_365_552, 3, 37_632)
    assert row["tokens_fp8_index_keys"] == 2_731_104
    # Of 2 x 520 bytes in whole lines of 128.
    assert row["host_gib_int8"] == pytest.approx(row["host_gib_bf16"] * 1152 / 2048, abs=0.01)
    assert host_kv_capacity.followed(3) == 1_250_832
