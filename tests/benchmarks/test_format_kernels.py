"""The GPU measurement's code, on the CPU and on a twentieth of the widths: everything but the kernels is the same."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import record
from benchmarks.format_kernels import __main__ as command
from benchmarks.format_kernels.cases import MODELOPT, Geometry, cases
from benchmarks.format_kernels.layers import _fill
from benchmarks.format_kernels.packed import packed
from demo.checkpoint.mixes import PUBLISHED


def test_one_case_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "commit", lambda: "0123456789")
    wanted = {"attention output", "experts", "lm_head", "embed_tokens", "hyper-connection up"}
    monkeypatch.setattr(command, "cases", lambda geometry: [c for c in cases(geometry) if c.module in wanted])
    out = tmp_path / "formats-test.json"
    assert command.main(["--device", "cpu", "--narrow", "20", "--out", str(out)]) == 0
    samples = json.loads(out.read_text())["samples"]
    assert {row["module"] for row in samples} == wanted
    assert not [row for row in samples if "error" in row]
    assert all(row["relative"] < command.RELATIVE_LIMIT and row["bytes"] > 0 for row in samples)


def test_a_case_that_fails_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "cases", lambda geometry: [c for c in cases(geometry) if c.module == "lm_head"])
    monkeypatch.setattr(command, "build", lambda *_: 1 / 0)
    out = tmp_path / "formats-test.json"
    assert command.main(["--device", "cpu", "--narrow", "20", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert written["samples"][0]["error"] == "ZeroDivisionError: division by zero"
    assert [claim["value"] for claim in written["claims"]][1] == 1


def test_real_widths():
    """Those of the published config; a fused layer's width is the sum of its parts."""
    config = PUBLISHED
    sizes = {(case.module, case.inputs, case.outputs) for case in cases(Geometry())}
    hidden, head = config["hidden_size"], config["head_dim"]
    q = 2 * config["num_attention_heads"] * head
    kv = 2 * config["num_key_value_heads"] * head
    index = (config["indexer_n_heads"] + config["indexer_kv_heads"]) * config["indexer_head_dim"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    inner, streams = config["moe_intermediate_size"], config["hc_count"] * hidden
    assert sizes == {
        ("q, k, v", hidden, q + kv),
        ("q, k, v and indexer", hidden, q + kv + index),
        ("attention output", q // 2, hidden),
        ("delta net q, k, v, z", hidden, 2 * key + 2 * value),
        ("delta net output", value, hidden),
        ("shared expert gate, up", hidden, 2 * config["shared_expert_intermediate_size"]),
        ("shared expert down", config["shared_expert_intermediate_size"], hidden),
        ("hyper-connection down", streams, config["hc_lowrank"]),
        ("hyper-connection up", config["hc_lowrank"], streams),
        ("experts", hidden, inner),
        ("lm_head", hidden, config["vocab_size"]),
        ("embed_tokens", hidden, config["vocab_size"]),
    }
    assert Geometry().experts == (config["num_experts"], config["num_experts_per_tok"])


def test_parts_are_joined_and_what_one_part_measured_is_no_error(tmp_path):
    from benchmarks import record
    from benchmarks.format_kernels.__main__ import join

    row = {"module": "experts", "format": "gptq INT4 g32", "backend": "auto"}
    other = {"module": "lm_head", "format": "gptq INT4 g32", "backend": "humming"}
    third = {"module": "experts", "format": "gptq INT4 g32", "backend": "humming", "error": "not installed"}
    settings = {"command": "x"}
    parts = {
        "a": [row | {"kernel": "K", "tokens": 1, "relative": 0.001}, other | {"error": "not run"}],
        "b": [row | {"error": "no kernel"}, row | {"kernel": "K", "tokens": 1, "relative": 0.5}, third],
        "c": [other | {"kernel": "H", "tokens": 8, "relative": 0.002}],
    }
    paths = []
    for name, samples in parts.items():
        paths.append(f"{tmp_path}/formats-{name}.json")
        record.write(Path(paths[-1]), settings, samples, [], "1 x card", measured=name)
    paths[1] += ":auto"
    assert join(paths, tmp_path / "formats-all.json") == 0
    made = record.read(tmp_path / "formats-all.json")
    assert [(s["module"], s["relative"], s["commit"]) for s in made["samples"]] == [
        ("experts", 0.001, "a"),
        ("lm_head", 0.002, "c"),
    ]
    record.write(Path(paths[0]), settings, [], [], "1 x another card", measured="b")
    with pytest.raises(SystemExit, match="different hardware"):
        join(paths, tmp_path / "formats-all.json")


def test_an_experts_single_numbers_are_those_of_gate_and_up():
    tensors, _ = packed(64, 128, None, MODELOPT, "cpu")
    assert tensors["weight_scale_2"].shape == ()
    layer = SimpleNamespace(
        w13_weight=torch.zeros(2, 64, 64, dtype=torch.uint8),
        w13_weight_scale=torch.zeros(2, 64, 8, dtype=torch.float8_e4m3fn),
        w13_weight_scale_2=torch.zeros(2, 2),
        w13_input_scale=torch.zeros(2, 2),
    )
    size = _fill(layer, "w13", 1, tensors)
    assert layer.w13_weight_scale_2.tolist() == [[0, 0], [tensors["weight_scale_2"].item()] * 2]
    assert torch.equal(layer.w13_weight[1], tensors["weight"]) and not layer.w13_weight[0].any()
    # Nobody reads the activations' scale.
    assert size == 64 * 64 + 64 * 8 + 4
