"""Repaired checkpoints pass; the source is left alone; what cannot be repaired is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ampere.cases import CASES
from tests.ampere.drafts import SAMPLING, Draft
from vllm.ampere.checkpoint import read
from vllm.ampere.findings import findings
from vllm.ampere.repair import RepairError, repair
from vllm.ampere.repair.write import OutInSource, OutNotEmpty, OutUnwritable

#: findings that JSON alone can mend
MENDED = (
    "KeyMisplaced",
    "OldModelName",
    "PleLayerElsewhere",
    "SharedTarget",
    "SchemeContradicted",
    "IndexTensorAbsent",
    "TensorOutsideIndex",
)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def repaired(source: Path, out: Path, sampling=None):
    checkpoint = read(source)
    return repair(checkpoint, findings(checkpoint), out, sampling)


@pytest.mark.parametrize("name", MENDED)
def test_mended(name, tmp_path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    CASES[name](source)
    before = snapshot(source)
    done = repaired(source, out)
    assert done.changes and done.remaining == []
    assert findings(read(out)) == []
    assert snapshot(source) == before
    weights = sorted(out.glob("*.safetensors"))
    assert weights and all(path.is_symlink() and path.resolve().parent == source for path in weights)
    assert not (out / done.changes[0][0]).is_symlink()


def test_sampling_is_added_where_it_is_given(tmp_path) -> None:
    CASES["SamplingUnsaid"](tmp_path / "model")
    without = repaired(tmp_path / "model", tmp_path / "without")
    assert [item.name for item in without.remaining] == ["SamplingUnsaid"] and without.changes == []
    done = repaired(tmp_path / "model", tmp_path / "with", SAMPLING)
    assert done.remaining == []
    assert json.loads((tmp_path / "with/generation_config.json").read_text()) == {"eos_token_id": 2} | SAMPLING


@pytest.mark.parametrize("name", ["TensorMissing", "ShardTruncated", "RouterQuantized", "NgramShardMissing"])
def test_what_json_cannot_mend_remains(name, tmp_path) -> None:
    CASES[name](tmp_path / "model")
    done = repaired(tmp_path / "model", tmp_path / "out")
    assert [item.name for item in done.remaining] == [name]


def test_each_group_gets_the_layers_that_it_fits(tmp_path) -> None:
    """Through upstream's own reading: for every kind of module the scheme that its tensors have."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    CASES["SharedTarget"](tmp_path / "model")
    repaired(tmp_path / "model", tmp_path / "out")
    raw = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert [*raw["config_groups"]] == ["group_0", "group_1", "group_2", "group_3"]
    config = CompressedTensorsConfig.from_config(raw)
    layer = object.__new__(ReplicatedLinear)

    def scheme(name: str):
        found = config.get_scheme_dict(layer, name)
        return found and (found["weights"].num_bits, found["weights"].group_size)

    checkpoint = read(tmp_path / "model")
    for name, module in checkpoint.modules.items():
        storage = checkpoint.storages[name]
        if storage.kind == "pack":
            group = storage.inputs if storage.group == -1 else storage.group
            assert scheme(f"model.{name}") == (storage.bits, group), name
        elif module.kind in ("router", "ple", "ngram_table"):
            assert scheme(f"model.{name}") is None, name


def test_a_layer_of_its_own_is_named(tmp_path) -> None:
    """One attention layer in eight bits: a pattern for each layer of that kind, not one for all."""
    from demo.checkpoint.sparse import Packed

    draft = Draft.mixed(shared_target=True)
    for leaf, outputs in (("gate_proj", 128), ("up_proj", 128)):
        name = f"model.layers.2.mlp.shared_expert.{leaf}"
        draft.tensors |= {f"{name}.{suffix}": entry for suffix, entry in Packed(8, 128).tensors(outputs, 256).items()}
    draft.write(tmp_path / "model")
    done = repaired(tmp_path / "model", tmp_path / "out")
    assert done.remaining == []
    groups = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]
    assert r"re:.*layers\.2\.mlp\.shared_expert\.up_proj$" in groups["group_3"]["targets"]
    assert r"re:.*layers\.1\.mlp\.shared_expert\.up_proj$" in groups["group_1"]["targets"]


def test_a_scheme_without_a_group_gets_one(tmp_path) -> None:
    CASES["SharedTarget"](tmp_path / "model")
    config = tmp_path / "model/config.json"
    raw = json.loads(config.read_text())
    del raw["quantization_config"]["config_groups"]["group_1"]
    config.write_text(json.dumps(raw))
    assert repaired(tmp_path / "model", tmp_path / "out").remaining == []


def test_out_is_never_overwritten(tmp_path) -> None:
    CASES["KeyMisplaced"](tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    with pytest.raises(OutNotEmpty, match="not empty"):
        repaired(tmp_path / "model", out)
    assert [path.name for path in out.iterdir()] == ["notes"]
    with pytest.raises(OutNotEmpty, match="is a file"):
        repaired(tmp_path / "model", out / "notes")


@pytest.mark.parametrize("inside", ["", "repaired"])
def test_out_is_never_the_source(inside, tmp_path) -> None:
    CASES["KeyMisplaced"](tmp_path / "model")
    before = snapshot(tmp_path / "model")
    with pytest.raises(OutInSource):
        repaired(tmp_path / "model", tmp_path / "model" / inside)
    assert snapshot(tmp_path / "model") == before


def test_a_place_that_cannot_be_written_is_said(tmp_path) -> None:
    CASES["KeyMisplaced"](tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutUnwritable, match="cannot be written"):
        repaired(tmp_path / "model", tmp_path / "file/out")
    assert issubclass(OutUnwritable, RepairError)


def test_links_lead_past_the_links_of_a_hub_cache(tmp_path) -> None:
    blobs, snapshot_folder = tmp_path / "blobs", tmp_path / "snapshot"
    CASES["KeyMisplaced"](blobs)
    snapshot_folder.mkdir()
    for path in blobs.iterdir():
        (snapshot_folder / path.name).symlink_to(path)
    repaired(snapshot_folder, tmp_path / "out")
    assert all(path.readlink().parent == blobs for path in (tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("name", ["KeyMisplaced", "OldModelName"])
def test_transformers_reads_the_repaired_config(name, tmp_path) -> None:
    from transformers import AutoConfig

    CASES[name](tmp_path / "model")
    repaired(tmp_path / "model", tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["Qwen4ExpForConditionalGeneration"]
    assert (config.model_type, config.text_config.model_type) == ("qwen4_exp", "qwen4_exp_text")
    assert config.text_config.hc_lowrank == 320 and config.text_config.num_experts == 4


def test_groups_of_other_types_are_kept(tmp_path) -> None:
    """An FP8 group beside the integer ones is neither given their layers nor taken out."""
    CASES["SharedTarget"](tmp_path / "model")
    config = tmp_path / "model/config.json"
    raw = json.loads(config.read_text())
    fp8 = {"targets": ["re:.*visual.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    raw["quantization_config"]["config_groups"] = {"fp8": fp8} | raw["quantization_config"]["config_groups"]
    config.write_text(json.dumps(raw))
    assert repaired(tmp_path / "model", tmp_path / "out").remaining == []
    groups = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"]
    assert [*groups] == ["fp8", "group_0", "group_1", "group_2", "group_3"] and groups["fp8"] == fp8
