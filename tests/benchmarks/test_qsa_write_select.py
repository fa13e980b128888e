"""The benchmark of writer and selection, on a CPU: it runs, it would notice a wrong selection, and what it claims."""

import pytest
import torch

from benchmarks import record
from benchmarks.qsa_write_select import __main__ as benchmark
from benchmarks.qsa_write_select import selection, tried
from vllm.models.qwen4_exp.qsa import select

SMALL = ["--device", "cpu", "--contexts", "200", "--longest", "256", "--users", "2", "--chunk", "5"]
SMALL += ["--tokens", "2", "--budget", "32", "--page", "16", "--narrow", "--vocabulary", "512"]


def test_a_run_without_a_gpu(tmp_path):
    out = tmp_path / "qsa-write-select-test.json"
    assert benchmark.main([*SMALL, "--keys", "fp8", "--out", str(out)]) == 0
    found = record.read(out)
    assert {row["part"] for row in found["samples"]} == {"select", "write", "guard"}
    assert {row["keys"] for row in found["samples"] if row["part"] == "select"} == {"fp8"}
    assert {row["format"] for row in found["samples"] if row["part"] == "write"} == {"bf16", "fp8", "int8"}
    assert [claim["value"] for claim in found["claims"]] == [0, 0, 0]
    assert found["settings"]["workspace_bytes"] == 64 << 20


def test_one_part_alone(tmp_path):
    out = tmp_path / "qsa-guard-test.json"
    assert benchmark.main([*SMALL, "--out", str(out), "--parts", "guard"]) == 0
    assert {row["part"] for row in record.read(out)["samples"]} == {"guard"}


def scene(**changes) -> selection.Scene:
    torch.manual_seed(0)
    sizes = dict(requests=1, rows=3, context=200, longest=256, budget=32, page=16, device="cpu", kinds=6)
    return selection.Scene(**sizes | changes)


def test_scores_alone_and_other_settings():
    measured = [row["what"] for row in selection.times(scene(rows=1, context=140), None, tries=True)]
    assert measured == ["ours", "ours, scores alone", *(f"ours, {name}" for name in tried.DECODE)]


def test_the_checks_notice_another_tie(monkeypatch):
    def other_tie(*args):
        select_prefill(*args)
        out = args[8]
        out[0, -1] = next(g for g in range(200 // 4 - 1, -1, -1) if g not in out[0].tolist())

    select_prefill = select.qsa_select_paged_prefill
    assert selection.checks(scene(), repeats=1)["rows_not_exact"] == 0
    monkeypatch.setattr(select, "qsa_select_paged_prefill", other_tie)
    assert selection.checks(scene(), repeats=1)["rows_not_exact"] == 1


def test_fp8_keys_are_measured_at_the_longest_contexts(monkeypatch):
    monkeypatch.setattr(selection, "times", lambda *args: iter([{"what": "ours"}]))
    monkeypatch.setattr(selection, "checks", lambda case: {"dtype": case.dtype})
    rows = list(selection.measure([40, 80, 60], [1], 5, 80, 32, 4, "cpu", None))
    assert [(row["keys"], row["context"]) for row in rows if row["what"] == "ours" and row["rows"] == 1] == [
        ("bf16", 40), ("bf16", 80), ("bf16", 60), ("fp8", 60), ("fp8", 80)
    ]  # fmt: skip
    assert {row["dtype"] for row in rows if row["keys"] == "fp8" and "dtype" in row} == {torch.float8_e4m3fn}
    assert scene(dtype=torch.float8_e4m3fn).bytes_moved() < scene().bytes_moved()


@pytest.mark.parametrize("ours, holds", [(9.0, True), (11.0, False)])
def test_speed_is_claimed_beside_upstreams(ours, holds):
    select_rows = {"part": "select", "context": 8192, "requests": 1, "rows": 1}
    write_rows = {"part": "write", "tokens": 8}
    samples = [
        select_rows | {"what": "upstream", "graph_microseconds": 10.0},
        select_rows | {"what": "ours", "graph_microseconds": ours},
        write_rows | {"what": "upstream", "format": "bf16", "graph_microseconds": 10.0},
        write_rows | {"what": "both parts", "format": "int8", "graph_microseconds": ours},
        write_rows | {"what": "both parts", "format": "bf16", "graph_microseconds": 99.0},
        select_rows | {"what": "upstream", "keys": "fp8", "graph_microseconds": 10.0},
        select_rows | {"what": "ours", "keys": "fp8", "graph_microseconds": ours},
    ]
    speed = [claim for claim in benchmark.claimed(samples) if claim.unit == "times upstream's"]
    assert [(claim.value, claim.holds) for claim in speed] == [(ours / 10, holds)] * 3
    assert [claim.name for claim in speed if "keys in fp8" in claim.name] == ["select, 1 x 1 rows at 8192, keys in fp8"]
