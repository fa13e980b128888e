"""Finding the table, and one error per way its files can be wrong."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm.models.qwen4_exp.ple_store import errors
from vllm.models.qwen4_exp.ple_store.formats import locate_table
from vllm.models.qwen4_exp.ple_store.header import read_header

LAYER = "layers.1.ple.ple_embedding.ngram_embedding"
NAME = f"model.language_model.{LAYER}"


def edit(path, change):
    """Rewrite a safetensors file: ``change`` gets its tensors as a dict."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_offsets_point_at_the_rows(write_table):
    written = write_table()
    location = written.locate()
    assert location.rows == 37 and location.dim == 6 and location.dtype == torch.bfloat16
    assert [shard.rows for shard in location.shards] == [8, 8, 8, 8, 5]
    for shard, start in zip(location.shards, (0, 8, 16, 24, 32), strict=True):
        data = shard.path.read_bytes()[shard.offset : shard.offset + 12]
        assert data == written.values[start].view(torch.uint8).numpy().tobytes()


def test_only_files_with_the_table_are_opened(write_table):
    written = write_table()
    (written.folder / "model-99.safetensors").write_bytes(b"not safetensors")
    index = written.folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["lm_head.weight"] = "model-99.safetensors"
    index.write_text(json.dumps(names))
    written.locate()


def test_without_an_index_all_files_are_looked_at(write_table):
    assert write_table(index=False).locate().rows == 37


def test_an_undivided_table(write_table):
    written = write_table(parts=1)
    for path in written.files:
        edit(path, lambda t: t.update({f"{NAME}.weight": t.pop(f"{NAME}.shard_0.weight")}))
    (written.folder / "model.safetensors.index.json").unlink()
    assert written.locate(parts=512).rows == 37


@pytest.mark.parametrize("drop", [False, True])
def test_trailing_shards_of_no_rows(write_table, drop):
    written = write_table(rows=6, parts=5, index=False)  # 2 2 2 0 0
    if drop:
        for path in written.files:
            edit(path, lambda t: [t.pop(n) for n in list(t) if not t[n].numel()])
    assert [shard.rows for shard in written.locate().shards] == [2, 2, 2]


def test_another_layers_table_is_not_ours(write_table):
    written = write_table()
    with pytest.raises(errors.TableNotFound):
        locate_table(written.folder, LAYER.replace("layers.1.", "layers.11."), written.shape)
    with pytest.raises(errors.TableNotFound):
        locate_table(written.folder, LAYER.replace("layers.1.", "s.1."), written.shape)


def test_no_table(tmp_path, write_table):
    written = write_table()
    for path in written.files:
        path.unlink()
    (written.folder / "model.safetensors.index.json").unlink()
    with pytest.raises(errors.TableNotFound, match="none in .*safetensors.*host_file_gather"):
        written.locate()


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard(write_table, index):
    written = write_table(index=index)
    edit(written.files[1], lambda t: t.pop(f"{NAME}.shard_2.weight"))
    with pytest.raises(errors.MissingShard, match="shard_2" if index else "first of them shard 2"):
        written.locate()


def test_missing_file(write_table):
    written = write_table()
    written.files[2].unlink()
    with pytest.raises(
        errors.MissingShard, match="model-04.safetensors: expected 1 tensors of the table, found no such file"
    ):
        written.locate()


def test_shard_missing_from_the_index(write_table):
    written = write_table()
    index = written.folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    del names["weight_map"][f"{NAME}.shard_4.weight"]
    index.write_text(json.dumps(names))
    with pytest.raises(errors.MissingShard, match="all but 1, the first of them shard 4"):
        written.locate()


def test_shard_twice(write_table):
    written = write_table(index=False)
    save_file({f"model.{LAYER}.shard_0.weight": torch.zeros(8, 6)}, written.folder / "stale.safetensors")
    with pytest.raises(errors.DuplicateShard, match="stale.safetensors.*also in .*model-00"):
        written.locate()


def test_divided_and_undivided(write_table):
    written = write_table(index=False)
    save_file({f"{NAME}.weight": written.values}, written.folder / "whole.safetensors")
    with pytest.raises(errors.DuplicateShard, match="whole.safetensors.*both"):
        written.locate()


@pytest.mark.parametrize("changes", [{"dim": 8}, {"rows": 38}, {"parts": 4}])
def test_wrong_shape(write_table, changes):
    with pytest.raises(errors.WrongShape, match="config and the weights are not of the same model"):
        write_table().locate(**changes)


def test_shards_of_different_dtypes(write_table):
    written = write_table()
    edit(written.files[1], lambda t: t.update({f"{NAME}.shard_3.weight": torch.zeros(8, 6)}))
    with pytest.raises(errors.WrongDtype, match="expected BF16 for .*shard_3.weight, as before, found F32"):
        written.locate()


def test_truncated_file(write_table):
    written = write_table()
    size = written.files[2].stat().st_size
    os.truncate(written.files[2], size - 3)
    with pytest.raises(errors.TruncatedFile, match=rf"model-04.*expected {size} bytes .*found {size - 3} bytes"):
        written.locate()


def test_truncated_header(write_table):
    written = write_table()
    os.truncate(written.files[0], 100)
    with pytest.raises(errors.TruncatedFile, match="a header of"):
        written.locate()


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 40, (9).to_bytes(8, "little") + b"not: json"])
def test_no_safetensors(write_table, content):
    written = write_table()
    written.files[0].write_bytes(content)
    with pytest.raises(errors.BadHeader, match="model-00"):
        written.locate()


def test_sizes_that_contradict_shapes(tmp_path):
    text = json.dumps({"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 10]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(10))
    with pytest.raises(errors.BadHeader, match="expected 12 bytes for x, found 10 bytes"):
        read_header(path)


def test_damaged_index(write_table):
    written = write_table()
    (written.folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(errors.BadHeader, match="index.json: expected a weight_map"):
        written.locate()


def test_unreadable_file(write_table):
    written = write_table()
    written.files[0].unlink()
    written.files[0].mkdir()  # permissions do not stop a test that runs as root
    with pytest.raises(errors.UnreadableFile, match="Is a directory"):
        written.locate()


def test_errors_survive_the_way_from_a_worker():
    error = pickle.loads(pickle.dumps(errors.TruncatedFile("a.safetensors", "12 bytes", "9 bytes")))
    assert (error.path, error.expected, error.actual) == ("a.safetensors", "12 bytes", "9 bytes")
    assert "expected 12 bytes, found 9 bytes" in str(error)
    refused = pickle.loads(pickle.dumps(errors.HostFileGatherRefused("x", 1, "is odd.", "Leave it out.")))
    assert str(refused) == "x=1 is odd. Leave it out."
