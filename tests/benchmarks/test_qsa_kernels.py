"""What of the kernels' benchmark runs without a GPU: every case once, small, and the figures made of the geometry."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.qsa_kernels import __main__ as command
from benchmarks.qsa_kernels import check, inputs, roofline, tried
from benchmarks.qsa_kernels.geometry import published
from vllm.models.qwen4_exp.qsa.formats import BF16, INT8
from vllm.models.qwen4_exp.qsa.tiles import TILES, Tile


def test_a_small_run(tmp_path):
    out = tmp_path / "qsa-test.json"
    arguments = ["--device", "cpu", "--contexts", "44", "--requests", "1", "--block-size", "16", "--prefill-rows", "2"]
    assert command.main([*arguments, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {(row["format"], row["mode"], row["kernel"]) for row in found["samples"]} == {
        (form, mode, kernel)
        for form, kernel in (("bf16", "upstream"), ("bf16", "ours"), ("int8", "ours"), ("fp8", "ours"))
        for mode in ("decode", "prefill")
    }
    assert all("failed" not in row and row["bytes"] > 0 for row in found["samples"])
    assert [claim["value"] for claim in found["claims"]] == [0.0, 0.0]


def test_a_sweep_checks_each_format_once(tmp_path, monkeypatch):
    tiles = [Tile(16, split, 1, 1, 1) for split in (16, 32)]
    monkeypatch.setattr(command, "candidates", lambda form: tiles)
    monkeypatch.setattr(command, "times", lambda *_: {"microseconds": 1.0})
    monkeypatch.setattr(check, "error", lambda *_: {"error": 0.0, "floor": 1.0})
    monkeypatch.setattr(check, "differing_rows", lambda *_: 0)
    out = tmp_path / "qsa-test.json"
    arguments = ["--device", "cpu", "--sweep", "--contexts", "44", "--block-size", "16", "--prefill-rows", "2"]
    assert command.main([*arguments, "--out", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["samples"] if row["kernel"] == "ours"]
    assert [row["format"] for row in rows] == ["int8"] * 6 + ["fp8"] * 6 + ["bf16"] * 6
    assert [row["mode"] for row in rows[:6:2]] == ["prefill", "decode", "decode"]
    assert [("differing_rows" in row) for row in rows] == 3 * ([True] + [False] * 5)


def test_what_a_sweep_tries_has_the_tables_tile():
    for form in command.FORMATS:
        assert 4 <= len(tried.candidates(form)) <= 10
        assert {TILES[86, form], TILES[90, form]} <= set(tried.candidates(form))


def test_what_is_compiled_ahead_has_no_columns(monkeypatch):
    """Threads launch it at once over one workspace."""
    shape, launched = command.small(), []
    monkeypatch.setattr(
        tried, "ours", lambda tile: SimpleNamespace(attention=lambda *call: launched.append((tile, *call)))
    )
    asked, tiles = inputs.queries(shape, 1, 3, 66, "cpu"), [Tile(16, split, 1, 1, 1) for split in (16, 32)]
    tried.compile_all(tiles, None, asked)
    assert len({(tile, prefill) for tile, _, _, prefill in launched}) == len(launched) == 4
    for _, _, rows, _ in launched:
        assert rows.selected.shape == asked.selected.shape and rows.selected[:, -1].tolist() == [0, 0, 0]
        assert rows.selected[:, :-1].max() == -1
    assert asked.selected[:, -1].min() > 0 and torch.equal(launched[0][2].q, asked.q)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(check, "error", lambda *_: {"error": 1.0, "floor": 0.1})
    monkeypatch.setattr(command, "times", lambda *_: pytest.fail("timed"))
    kernel = SimpleNamespace(attention=None, named={"kernel": "ours"}, tile=None)
    got = command.sample(kernel, None, command.Case(BF16, 1, 1, False), None, None, None, True, (None, None), "cpu")
    assert got["failed"] == "error 1.00e+00, floor 1.00e-01"


def test_a_selection_is_an_indexers():
    shape = command.small()
    asked = inputs.queries(shape, 1, 3, 66, "cpu")
    for row, position in zip(asked.selected.tolist(), range(63, 66)):
        count, open_tokens = row[-1], (position + 1) % shape.ratio
        assert (
            count == shape.budget + open_tokens
            and row[:count] == sorted(set(row[:count]))
            and row[count - 1] <= position
        )
        assert row[count - open_tokens : count] == list(range(position + 1 - open_tokens, position + 1))


def test_speeds_are_held_against_upstreams_bf16():
    row = {"context": 1, "requests": 1, "mode": "decode"}
    samples = [
        row | {"kernel": "upstream", "format": "bf16", "microseconds": 9.0},
        row | {"kernel": "ours", "format": "int8", "microseconds": 6.0},
    ]
    claims = {claim.name: claim for claim in command.claimed(samples, timed=True)}
    assert claims["decode of int8, least speed against upstream's bf16"].value == 1.5


def test_bytes_of_a_row():
    shape = published()
    assert (shape.layers, shape.width, shape.group) == (12, 2051, 12)
    assert shape.kv_bytes(BF16, 2048) == 4 << 20  # 48 MiB a token of 12 layers
    assert shape.kv_bytes(INT8, 1) == 2 * 520
    assert shape.products(2048, 12) == 24 * 2048 * 256 * 2


def test_index_keys_outgrow_attention():
    lines = roofline.index_table().splitlines()[2:]
    read = [[float(cell.replace(",", "")) for cell in line.strip("| ").split("|")] for line in lines]
    assert [row[2] > row[5] for row in read] == [False, False, True]
    assert [row[3] > row[6] for row in read] == [False, False, True]
    assert all(abs(row[2] - 2 * row[3]) <= 0.16 for row in read)
