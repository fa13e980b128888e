"""`vllm ampere flatten-ple` as a command: what it writes, says and answers with."""

from __future__ import annotations

import pytest

from tests.ampere.drafts import SMALL, Draft
from vllm.ampere.command import main
from vllm.models.qwen4_exp.ple_store.flat.layout import read_flat_header


@pytest.fixture
def checkpoint(tmp_path):
    return str(Draft().write(tmp_path / "model"))


def test_written_verified_and_written_once(checkpoint, tmp_path, capsys) -> None:
    out = tmp_path / "table.flat"
    assert main(["flatten-ple", checkpoint, str(out), "--verify"]) == 0
    said = capsys.readouterr().out
    table = read_flat_header(out)
    assert table.layer == "layers.1.ple.ple_embedding.ngram_embedding" and table.dim == SMALL["ple_embed_dim"] // 16
    assert f"{table.count} rows of 16 values, bfloat16" in said and "verified" in said
    assert f'--engram-config \'{{"host_file_path": "{out}"}}\'' in said
    assert main(["flatten-ple", checkpoint, str(out)]) == 0
    assert ", verified." not in capsys.readouterr().out


def test_damage_is_status_1(checkpoint, tmp_path, capsys) -> None:
    out = tmp_path / "table.flat"
    main(["flatten-ple", checkpoint, str(out)])
    content = bytearray(out.read_bytes())
    content[5000] ^= 1
    out.write_bytes(content)
    capsys.readouterr()
    assert main(["flatten-ple", checkpoint, str(out), "--verify"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "vllm ampere flatten-ple: A flat n-gram table is damaged" in said.err


def test_nothing_there_is_status_1(tmp_path, capsys) -> None:
    assert main(["flatten-ple", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_folder_that_is_not_there(checkpoint, tmp_path, capsys) -> None:
    assert main(["flatten-ple", checkpoint, str(tmp_path / "no" / "out")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("layer", ["1", "7"])
def test_a_layer_without_a_table_is_status_2(checkpoint, tmp_path, capsys, layer) -> None:
    assert main(["flatten-ple", checkpoint, str(tmp_path / "out"), "--layer", layer]) == 2
    assert f"--layer {layer}: the model has [2]" in capsys.readouterr().err
