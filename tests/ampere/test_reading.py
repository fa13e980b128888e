"""Reading a checkpoint: without torch, from a directory or the hub's cache, and nothing made up."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from demo.checkpoint import mixes
from tests.ampere.drafts import Draft
from vllm.ampere import checkpoint as package
from vllm.ampere.checkpoint import read
from vllm.ampere.checkpoint.config import text_config
from vllm.ampere.checkpoint.errors import NoSuchCheckpoint, NotDownloaded
from vllm.ampere.checkpoint.names import class_of, split, template
from vllm.ampere.checkpoint.storage import observe
from vllm.ampere.checkpoint.table import shard_rows, table_rows

AMPERE = Path(package.__file__).resolve().parent.parent


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(AMPERE.rglob("*.py")), ids=lambda path: str(path.relative_to(AMPERE)))
def test_nothing_but_the_standard_library_is_imported(path) -> None:
    for name in imports(path):
        assert name.split(".")[0] in sys.stdlib_module_names or name.startswith("vllm.ampere"), name


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache with two snapshots of one model; returns the folder of the model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--model"
    for commit in ("old", "new"):
        Draft().write(folder / "snapshots" / commit)
    return folder


def test_a_hub_id_is_its_main_snapshot(hub) -> None:
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("old")
    assert read("someone/model").path == hub / "snapshots/old"


def test_without_main_a_hub_id_is_its_latest_snapshot(hub) -> None:
    assert read("someone/model").path == hub / "snapshots/new"


def test_a_hub_id_that_is_not_here_is_one_sentence(hub) -> None:
    with pytest.raises(NotDownloaded, match="someone/other"):
        read("someone/other")


@pytest.mark.parametrize("name", ["no/such/folder", "nothing"])
def test_neither_a_directory_nor_a_hub_id(name) -> None:
    with pytest.raises(NoSuchCheckpoint, match=name):
        read(name)


def test_a_file_is_not_a_checkpoint(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NoSuchCheckpoint, match="a directory"):
        read(tmp_path / "model.safetensors")


def test_weights_behind_dangling_links_are_missing(tmp_path) -> None:
    out = Draft().write(tmp_path / "model")
    first = sorted(out.glob("*.safetensors"))[0]
    first.rename(tmp_path / "moved")
    first.symlink_to(tmp_path / "gone")
    assert read(out).absent == [first.name]


def test_the_published_table_has_its_rows() -> None:
    text = text_config(mixes.PUBLISHED)
    rows = table_rows(text, 0)
    assert rows == 320_001_536
    assert [shard_rows(rows, 128, n) for n in (0, 126, 127)] == [2_500_012] * 3
    assert shard_rows(10, 4, 3) == 1 and shard_rows(9, 4, 3) == 0


@pytest.mark.parametrize(
    "name, expected",
    [
        ("model.language_model.layers.3.self_attn.q_proj.weight_packed", ("attention", "weight_packed")),
        ("model.layers.3.self_attn.indexer.q_layernorm.weight", ("norms", "weight")),
        ("model.layers.0.linear_attn.A_log", ("gdn", "")),
        ("language_model.model.layers.0.mlp.experts.17.up_proj.qweight", ("experts", "qweight")),
        ("model.layers.0.mlp.gate.weight", ("router", "weight")),
        ("model.layers.0.mlp.shared_expert_gate.weight", ("shared_experts", "weight")),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", ("shared_experts", "weight")),
        ("model.hyper_connection_mixer.input_mix_weight_up.weight", ("hyper_connection", "weight")),
        ("model.layers.1.attn_hyper_connection.hc_norm.weight", ("norms", "weight")),
        ("model.layers.1.ple.key_proj.weight", ("ple", "weight")),
        ("model.layers.1.ple.norm_key.weight", ("norms", "weight")),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.shard_12.weight", ("ngram_table", "weight")),
        ("model.visual.blocks.0.norm1.weight", ("vision", "weight")),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", ("mtp", "weight")),
        ("model.embed_tokens.weight", ("embeddings", "weight")),
        ("lm_head.weight_scale", ("lm_head", "weight_scale")),
    ],
)
def test_names(name, expected) -> None:
    module, suffix = split(name)
    assert (class_of(template(module)), suffix) == expected


def packed(words: int, groups: int, outputs: int = 8):
    return (("weight_packed", "I32", (outputs, words)), ("weight_scale", "BF16", (outputs, groups)))


@pytest.mark.parametrize(
    "tensors, inputs, declared, expected",
    [
        (packed(320, 20), 2560, 0, (4, 128, False)),
        (packed(480, 40), 2560, 0, (6, 64, False)),
        (packed(512, 40), 2560, 6, (6, 64, True)),
        (packed(80, 10), 320, 8, (8, 32, False)),
        (packed(640, 1), 2560, 8, (8, -1, False)),
        # six bits with gaps, or seven without: what is declared decides
        (packed(7, 1), 32, 6, (6, -1, True)),
        (packed(7, 1), 32, 7, (7, -1, False)),
    ],
)
def test_packed_widths(tensors, inputs, declared, expected) -> None:
    storage = observe(tensors, inputs, declared)
    assert (storage.bits, storage.group, storage.loose) == expected and not storage.fault


@pytest.mark.parametrize(
    "tensors, expected",
    [
        ((("weight", "BF16", (8, 256)),), ("plain", "BF16", 8 * 256)),
        ((("weight", "F8_E4M3", (8, 256)), ("weight_scale_inv", "F32", (1, 2))), ("fp8", "FP8", 8 * 256)),
        ((("weight", "I8", (8, 256)), ("weight_scale", "BF16", (8, 1))), ("int8", "INT8 per channel", 8 * 256)),
        ((("weight", "U8", (8, 128)), ("weight_scale", "F8_E4M3", (8, 16))), ("nvfp4", "NVFP4", 8 * 256)),
        ((("weight_packed", "U8", (8, 128)), ("weight_scale", "U8", (8, 8))), ("mxfp4", "MXFP4", 8 * 256)),
        ((("qweight", "I32", (32, 8)), ("scales", "F16", (2, 8))), ("gptq", "INT4 g128", 8 * 256)),
        ((("qweight", "I32", (256, 1)), ("scales", "F16", (2, 8))), ("awq", "INT4 g128", 8 * 256)),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
def test_other_forms(tensors, expected) -> None:
    storage = observe(tensors, 256)
    assert (storage.kind, str(storage), storage.weights) == expected and not storage.fault


def test_a_layer_list_of_another_length_is_said(tmp_path) -> None:
    draft = Draft()
    draft.config["layer_types"] = ["linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(draft.config))
    with pytest.raises(ValueError, match="layer_types: expected 4 names .* found 1 of them"):
        read(tmp_path)
