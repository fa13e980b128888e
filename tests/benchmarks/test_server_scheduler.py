"""What is made of the servers' samples, and what the clients read of the scheduler's lines."""

from __future__ import annotations

import json

from benchmarks.server_scheduler import record
from benchmarks.server_scheduler.clients import micro_batches


def sample(scheduler: str, steady: list[int], rate: float, wait: float) -> dict:
    return {
        "scheduler": scheduler,
        "together": [{"users": 3, "steady": steady, "tokens_per_s_per_user": [rate, rate]}],
        "mixed": {"short_first_token_s": wait, "short_waited_micro_batches": 4, "long_first_token_s": 9.0},
    }


def test_claims():
    samples = [sample("upstream", [3, 0], 10.0, 8.0), sample("pipeline", [1, 1, 2], 12.0, 2.0)]
    largest, rate, wait = record.claims(samples)
    assert (largest.value, largest.aim, largest.holds) == (2, 1, False)
    assert (rate.value, rate.holds) == (1.2, True)
    assert (wait.value, wait.holds) == (0.25, True)
    assert not record.claims([samples[0], sample("pipeline", [], 9.0, 7.0)])[2].holds


def test_the_page(tmp_path, monkeypatch):
    made = {"samples": [sample("pipeline", [1, 1, 2], 12.0, 2.0)], "hardware": {"cpu": "a CPU"}}
    monkeypatch.setattr(record, "RECORD", tmp_path / "pipeline-cpu-server.json")
    record.RECORD.write_text(json.dumps(made | {"upstream": "vllm", "commit": "abc"}))
    shown = record.page()
    assert "| pipeline | 3 users decode | 2 of 1, 1 of 2 | 12.0 tokens/s a user |" in shown
    assert (
        "| pipeline | a short prompt behind a long one | first token after 4 | 2.00 s; the long one 9.00 s |" in shown
    )


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"at": 1.0, "decodes": 1, "tokens": 1}\n{"at": 2.0, "decodes": 2, "tokens": 2}\n{"at": 3.0, "dec')
    assert [one["decodes"] for one in micro_batches(path, 0.0)] == [1, 2]
    assert [one["decodes"] for one in micro_batches(path, 1.5)] == [2]
