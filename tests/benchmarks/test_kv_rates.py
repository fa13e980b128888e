"""Rates by K/V format: what runs where, how long users decode, and which claims a run makes."""

from __future__ import annotations

import json

import pytest

from benchmarks import record as records
from benchmarks.kv_rates import record
from benchmarks.kv_rates.rates import SETTLE, tokens_to_ask
from benchmarks.kv_rates.variants import AGAIN, BASE, CHUNK, VARIANTS, arguments, chosen


def test_everything_on_a_gpu_and_ours_on_a_cpu():
    assert chosen(None, cpu=False) == VARIANTS
    assert [variant.name for variant in chosen(None, cpu=True)] == ["int8 ours", "fp8 ours", "bf16 ours"]
    assert [variant.name for variant in chosen([AGAIN, BASE], cpu=False)] == [AGAIN, BASE]
    with pytest.raises(ValueError, match="no variant 'int8 stock'"):
        chosen(["int8 stock"], cpu=False)


def test_kernels_are_named_on_a_gpu_only():
    assert VARIANTS[1].engine(cpu=False) == {
        "kv_cache_dtype": "int8_per_token_head",
        "qsa_config": {"kernels": "ours"},
    }
    assert "qsa_config" not in VARIANTS[1].engine(cpu=True)


@pytest.mark.parametrize("users", [1, 8])
def test_the_first_user_still_decodes_when_the_last_was_counted(users):
    """Each chunk of the prompts behind it gives the first a token, and the model's length has room for all of them."""
    context, counted = 256_000, 96
    chunks = users * context // CHUNK
    asked = tokens_to_ask(context, users, CHUNK, counted)
    assert asked > chunks + SETTLE + counted
    assert arguments([8192, context], [1, users], counted, cpu=False)["max_model_len"] >= context + asked
    assert arguments([8192, context], [1, 8], counted, cpu=False)["max_model_len"] < 262_144


def sample(variant: str, prompt: float, decode: float) -> dict:
    return {"variant": variant, "context": 8192, "users": 8, "prompt_tokens_per_s": prompt, "per_user": decode}


def test_claims_compare_with_stock_bf16():
    samples = [sample(BASE, 1000, 100), sample("int8 ours", 960, 99), sample("fp8 stock", 300, 90)]
    claims = record.claims_of(samples)
    assert [(claim.value, claim.aim, claim.holds) for claim in claims] == [(0.96, 0.95, True), (0.99, 1.0, False)]
    assert not record.claims_of(samples[1:])


def test_a_step_on_the_gpu_is_compared_where_it_was_timed():
    samples = [sample(BASE, 1000, 100) | {"gpu_ms": 2.0}, sample("fp8 ours", 1000, 100) | {"gpu_ms": 1.9}]
    timed = [claim for claim in record.claims_of(samples) if "on the GPU" in claim.name]
    assert [(claim.value, claim.compare, claim.holds) for claim in timed] == [(0.95, "<=", True)]


def test_raw_results_become_a_record_and_a_table(tmp_path, monkeypatch):
    samples = [sample(BASE, 1000, 100), sample("int8 ours", 960, 120), sample(AGAIN, 1010, 101)]
    raw = {"hardware": records.hardware(), "gpus": "1 x card", "settings": {"layers": 4}, "samples": samples}
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    assert "Not measured on a GPU yet" in record.rates()
    record.write_record(tmp_path / "raw.json", tmp_path / "qsa-rates-card.json", "abc")
    table = record.rates()
    assert "| 8k | 8 | prefill | 1,000 | 960 (0.96) | 1,010 |" in table
    assert "| 8k | 8 | decode | 100.0 | 120.0 (1.20) | 101.0 |" in table and "1 x card" in table
