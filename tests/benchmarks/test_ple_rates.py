"""The script for GPUs, as far as it runs without one: what it asks engines for, and what it concludes."""

import json
from argparse import Namespace
from pathlib import Path

from benchmarks.ple_rates import __main__ as script
from benchmarks.ple_rates import record
from benchmarks.ple_rates.model import write
from tests.ampere.drafts import SMALL
from vllm.models.qwen4_exp.ple_store.flat.layout import read_flat_header


def sample(case: str, rate: float, waited: float = 0.1) -> dict:
    reads = {"steps": 100, "row_wait_seconds": waited / 10, "rows": 1600, "kernel_disk_bytes": 100 * 60 * 1024}
    return {
        "case": case,
        "pinned_bytes": 5 << 30 if case.startswith("pinned") else 1 << 30,
        "table_bytes": 4 << 30,
        "prefill": [{"context": 8192, "cache": cache, "tokens_per_s": 100 * rate} for cache in ("cold", "warm")],
        "decode": [{"users": 1, "cache": cache, "per_user": rate, "reads": reads} for cache in ("cold", "warm")],
    }


def test_claims():
    samples = [
        sample("shards, full graphs", 99.0),
        sample("pinned, full graphs", 100.0),
        sample("shards, eager", 50.0),
        {"case": "flat file, full graphs", "failed": "log"},
    ]
    found = {claim.name: claim for claim in record.claims(samples)}
    assert found["prefill of 8192 tokens, cold / pinned: shards, full graphs"].value == 0.99
    assert found["decode, 1 users, warm / pinned: shards, full graphs"].holds
    pinned = found["host memory pinned for rows: shards, full graphs"]
    assert pinned.value == 0 and pinned.holds
    assert found["decode under full graphs / eager, table on the disk"].value == 1.98
    assert found["waited for rows in a decode step, 1 users, warm: shards, full graphs"].value == 0.1
    assert found["read from the disk for a token, 1 users, cold: shards, full graphs"].value == 60
    slow = record.claims([sample("shards, full graphs", 90.0, waited=0.3), sample("pinned, full graphs", 100.0)])
    assert {claim.name.split(",")[0] for claim in slow if not claim.holds} == {
        "prefill of 8192 tokens",
        "decode",
        "waited for rows in a decode step",
    }


def test_a_model_over_a_real_table(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    model, flat, rows = write(tmp_path / "made", config, layers=4, experts=4, rows=20_000)
    assert 20_000 < rows < 22_000 and read_flat_header(flat).count == rows
    assert json.loads((model / "config.json").read_text())["split_ngram_parts"] == 8


def test_what_engines_are_asked_for():
    asked = Namespace(contexts=[100, 50], users=[1, 4], kv_gib=1.0)
    made = {
        name: script.engine_of(Path("model"), Path("flat"), place, graphs, asked)
        for name, (place, graphs) in script.CASES.items()
    }
    assert made["flat file, full graphs"]["engram_config"] == {"host_file_path": "flat"}
    assert made["pinned, eager"]["enforce_eager"] and "compilation_config" not in made["pinned, eager"]
    modes = {name: one["compilation_config"]["cudagraph_mode"] for name, one in made.items() if "eager" not in name}
    assert set(modes.values()) == {"FULL_DECODE_ONLY", "PIECEWISE"}
    assert all(one["max_model_len"] == 2148 and one["max_num_seqs"] == 4 for one in made.values())
