"""`vllm ampere check` where rows of the n-gram table are read from a flat file: named as for a server, judged as by one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.ampere.cases import CASES
from tests.ampere.drafts import SAMPLING, SMALL, TABLE, Draft, edit_json
from vllm.ampere.command import main
from vllm.models.qwen4_exp.ple_store.flat.layout import read_flat_header

INDEX = "model.safetensors.index.json"
#: rows of SMALL's table, and values of a row
ROWS, VALUES = 9216, 16


@pytest.fixture(autouse=True)
def no_variable(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PLE_MMAP_PATH", raising=False)


@pytest.fixture
def model(tmp_path) -> Path:
    return Draft().write(tmp_path / "model")


@pytest.fixture
def flat(model, tmp_path, capsys) -> Path:
    out = tmp_path / "table.flat"
    assert main(["flatten-ple", str(model), str(out)]) == 0
    capsys.readouterr()
    return out


@pytest.fixture
def check(capsys):
    """``check(model, flat, …)``: exit status, and the JSON object."""

    def run(model: Path, flat: Path | None = None, *options: str) -> tuple[int, dict]:
        named = ["--engram-config", json.dumps({"host_file_path": str(flat)})] if flat else []
        status = main(["check", str(model), "--json", *named, *options])
        return status, json.loads(capsys.readouterr().out)

    return run


def names(made: dict) -> list[str]:
    return [finding["name"] for finding in made["findings"]]


def make_room(out: Path, *, keep: int = 0) -> Path:
    """A checkpoint whose index and files have lost the table's shards, but for the first `keep`."""
    draft = Draft()
    for name in [name for name in draft.tensors if name.startswith(TABLE)][keep:]:
        del draft.tensors[name]
    return draft.write(out)


def test_beside_its_shards(model, flat, check) -> None:
    """The file is said, and stands for the shards wherever bytes are counted that a server would read."""
    status, made = check(model, flat, "-pp", "2")
    assert (status, names(made)) == (0, [])
    table = made["ngram_table_file"]
    assert table["file"] == str(flat) and table["bytes"] == flat.stat().st_size == read_flat_header(flat).size
    assert (table["layer"], table["rows"], table["row_bytes"], table["rows_compared"]) == (1, ROWS, 2 * VALUES, 64)
    assert [stage["ngram_table_bytes"] for stage in made["stages"]] == [table["bytes"], 0]
    _, without = check(model, None, "-pp", "2")
    assert without["ngram_table_file"] is None and without["stages"][0]["ngram_table_bytes"] == ROWS * 2 * VALUES
    for summary in (made, without):
        del summary["ngram_table_file"], summary["stages"]
    assert made == without


@pytest.mark.parametrize("keep", [0, 3])
def test_shards_that_made_room_are_not_missed(flat, check, tmp_path, keep) -> None:
    """And nothing is left to compare with. What a step reads, and what lies where, stays what it is with shards."""
    model = make_room(tmp_path / "room", keep=keep)
    assert check(model)[0] == 1
    status, made = check(model, flat, "-pp", "2")
    assert (status, names(made), made["ngram_table_file"]["rows_compared"]) == (0, [], 0)
    assert made["decode_step"]["row_bytes"] == SMALL["hidden_size"] * 2 + 16 * 2 * VALUES
    assert made["stages"][0]["ngram_table_bytes"] == flat.stat().st_size


@pytest.mark.parametrize("how", ["JSON", "dotted", "underscore", "variable", "both"])
def test_named_as_for_a_server(flat, tmp_path, capsys, monkeypatch, how) -> None:
    model = make_room(tmp_path / "room")
    if how in ("variable", "both"):
        monkeypatch.setenv("VLLM_PLE_MMAP_PATH", str(flat))
    options = {
        "JSON": ["--engram-config", json.dumps({"host_file_path": str(flat), "host_file_gather": True})],
        "dotted": ["--engram-config.host_file_path", str(flat)],
        "underscore": [f'--engram_config={{"host_file_path": "{flat}"}}'],
        "variable": [],
        "both": ["--engram-config.host_file_path", str(flat)],
    }
    assert main(["check", str(model), *options[how]]) == 0
    said = f"n-gram table of layer 1: {ROWS} rows, bfloat16, in {flat}, not compared."
    assert said in capsys.readouterr().out.splitlines()[-3].replace("The ", "")


@pytest.mark.parametrize(
    ("engram", "variable", "sentence"),
    [
        ('{"host_file_path": "/no/t"}', None, "host_file_path='/no/t' is no file. Write it first: vllm ampere flatten"),
        (None, "/no/t", "host_file_path='/no/t' is no file"),
        ('{"host_file_path": "/no/t"}', "FLAT", "VLLM_PLE_MMAP_PATH='FLAT' and host_file_path='/no/t' differ"),
        ('{"host_file_path": "FLAT", "host_file_gather": false}', None, "host_file_gather=False reads none"),
        ('{"host_file_path": "FLAT", "cpu_offload": false}', None, "cpu_offload=False puts the whole table on"),
        ('{"host_file_pat": "FLAT"}', None, "host_file_pat: Unexpected keyword argument"),
        ('["FLAT"]', None, '--engram-config ["FLAT"]: '),
        ("{", None, "--engram-config {: Expecting"),
    ],
)
def test_settings_that_no_server_takes(model, flat, capsys, monkeypatch, engram, variable, sentence) -> None:
    """Status 2, one line, and the server's own words where it has some."""
    if variable:
        monkeypatch.setenv("VLLM_PLE_MMAP_PATH", variable.replace("FLAT", str(flat)))
    options = [] if engram is None else ["--engram-config", engram.replace("FLAT", str(flat))]
    with pytest.raises(SystemExit) as stop:
        main(["check", str(model), *options])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("vllm ampere check: ") and sentence.replace("FLAT", str(flat)) in captured.err


def test_a_model_without_a_table(flat, tmp_path, capsys) -> None:
    draft = Draft()
    draft.config["ple_layer_ids"] = []
    draft.tensors = {name: entry for name, entry in draft.tensors.items() if ".ple." not in name}
    model = draft.write(tmp_path / "plain")
    assert main(["check", str(model)]) == 0
    with pytest.raises(SystemExit) as stop:
        main(["check", str(model), "--engram-config.host_file_path", str(flat)])
    assert stop.value.code == 2 and "this model has none (ple_layer_ids)" in capsys.readouterr().err


def replaced(flat: Path) -> None:
    """The last row is another one."""
    table, content = read_flat_header(flat), bytearray(flat.read_bytes())
    page, slot = divmod(table.count - 1, table.per_page)
    content[table.data_offset + page * 4096 + slot * table.row_bytes] ^= 1
    flat.write_bytes(content)


def unfinished(flat: Path) -> None:
    flat.rename(flat.with_name(flat.name + ".partial"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (replaced, rf"A flat n-gram table and the checkpoint disagree: table.flat: expected row {ROWS - 1} as "),
        (
            unfinished,
            "A flat n-gram table is not finished: table.flat: expected a finished file, found table.flat.partial",
        ),
        (lambda flat: flat.write_bytes(flat.read_bytes()[:-1]), "A file of the n-gram table is too short: table.flat"),
        (lambda flat: flat.write_bytes(b"\0" * 5000), "Not a flat n-gram table: table.flat: expected b'PLEFLAT1'"),
    ],
    ids=["replaced", "unfinished", "cut off", "no table"],
)
def test_refused(model, flat, check, damage, sentence) -> None:
    damage(flat)
    status, made = check(model, flat)
    assert (status, names(made), made["ngram_table_file"]) == (1, ["TableRefused"], None)
    (finding,) = made["findings"]
    assert sentence in finding["message"] and finding["message"].endswith(finding["remedy"]) and finding["remedy"]


def test_a_fault_beside_it_hides_nothing(flat, check, tmp_path) -> None:
    CASES["SharedTarget"](tmp_path / "broken")
    replaced(flat)
    assert set(names(check(tmp_path / "broken", flat)[1])) == {"TableRefused", "SharedTarget"}


@pytest.mark.parametrize("fault", ["PleLayerElsewhere", "NgramShardRows", "ShardMissing"])
def test_a_fault_is_said_once(flat, check, tmp_path, fault) -> None:
    """The store would stop at it too, in other words."""
    CASES[fault](tmp_path / "broken")
    assert names(check(tmp_path / "broken", flat)[1]) == [fault]


def test_a_cut_off_shard_is_said_once(model, flat, check) -> None:
    file = model / json.loads((model / INDEX).read_text())["weight_map"][f"{TABLE}.shard_0.weight"]
    os.truncate(file, file.stat().st_size - 1)
    assert names(check(model, flat)[1]) == ["ShardTruncated"]


def test_a_name_without_its_file_is_missed(model, flat, check) -> None:
    """The loader stops at it, so it has to leave the index as well."""
    home = json.loads((model / INDEX).read_text())["weight_map"][f"{TABLE}.shard_0.weight"]
    (model / home).unlink()
    assert names(check(model, flat)[1]) == ["ShardMissing"]


def test_what_was_repaired_is_judged_with_the_file(flat, check, tmp_path) -> None:
    model = make_room(tmp_path / "room")
    edit_json(model / "generation_config.json", lambda config: [config.pop(key) for key in SAMPLING])
    repair = ["--repair", str(tmp_path / "out"), "--sampling", json.dumps(SAMPLING)]
    status, made = check(model, flat, *repair)
    assert status == 0 and made["repair"]["verdict"] == "ok" and names(made) == ["SamplingUnsaid"]
    assert check(tmp_path / "out", flat)[1]["verdict"] == "ok"
