"""Every class of finding is found where it should be, says where and what, and nowhere else."""

from __future__ import annotations

import pickle

import pytest

from demo.checkpoint.sparse import Gptq
from tests.ampere.cases import CASES, argument
from tests.ampere.drafts import Draft, edit_json
from vllm.ampere.checkpoint import read
from vllm.ampere.finding import REFUSE, Finding
from vllm.ampere.findings import catalogue, findings, refuse


def found(path) -> list[Finding]:
    """What stops the reading, or what was found."""
    try:
        return findings(read(path))
    except Finding as error:
        return [error]


def test_every_finding_has_a_case() -> None:
    assert sorted(CASES) == sorted(item.__name__ for item in catalogue())


@pytest.mark.parametrize("name", CASES)
def test_finding(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    words = CASES[name](tmp_path / "model")
    items = found(argument(name, tmp_path / "model"))
    messages = [str(item) for item in items if item.name == name]
    assert any(all(word in message for word in words) for message in messages), [*map(repr, items)]
    assert str(pickle.loads(pickle.dumps(items[0]))) == str(items[0])


#: broken headers, which may take their tensors with them
MORE = {"OffsetsLeaveHole", "OffsetsOverlap", "NamedTwiceInHeader", "TensorBytesWrong"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - MORE))
def test_one_fault_is_one_class_of_finding(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    CASES[name](tmp_path / "model")
    assert {item.name for item in found(argument(name, tmp_path / "model"))} == {name}


@pytest.mark.parametrize(
    "draft",
    [Draft, Draft.mixed, Draft.gptq, lambda: Draft.gptq(64), Draft.multimodal],
    ids="bf16 mixed gptq128 gptq64 mm".split(),
)
def test_sound_checkpoints_pass(draft, tmp_path) -> None:
    assert found(draft().write(tmp_path / "model")) == []


def test_gaps_in_numbering_are_fine(tmp_path) -> None:
    out = Draft().write(tmp_path / "model")
    files = sorted(out.glob("*.safetensors"))
    index = out / "model.safetensors.index.json"
    files[0].rename(out / "model-00007-of-00003.safetensors")
    index.write_text(index.read_text().replace(files[0].name, "model-00007-of-00003.safetensors"))
    assert found(out) == []


def test_refuse_raises_the_first_refusal_with_the_others_as_notes(tmp_path) -> None:
    CASES["SharedTarget"](tmp_path / "model")
    edit_json(tmp_path / "model/config.json", lambda config: config.update(ple_layer_ids=[1]))
    items = findings(read(tmp_path / "model"))
    refusals = [item for item in items if item.severity == REFUSE]
    with pytest.raises(type(refusals[0])) as raised:
        refuse(items)
    assert len(refusals) > 1
    assert raised.value.__notes__ == [str(item) for item in refusals[1:]]


def test_warnings_alone_refuse_nothing(tmp_path) -> None:
    CASES["SamplingUnsaid"](tmp_path / "model")
    refuse(findings(read(tmp_path / "model")))


def test_gptq_rules_for_single_layers(tmp_path) -> None:
    """`dynamic`: one kind in eight bits, one layer left as it is; the output layer quantized as well."""
    draft = Draft.gptq()
    out_proj = {f"model.layers.{n}.linear_attn.out_proj": n for n in range(3)}
    for name in out_proj:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            del draft.tensors[f"{name}.{suffix}"]
    eight, plain = Gptq(8, 128).tensors(256, 256), {"weight": ("BF16", (256, 256))}
    for name, layer in out_proj.items():
        draft.tensors |= {f"{name}.{suffix}": entry for suffix, entry in (plain if layer == 2 else eight).items()}
    del draft.tensors["lm_head.weight"]
    draft.tensors |= {f"lm_head.{suffix}": entry for suffix, entry in Gptq(4, 128).tensors(512, 256).items()}
    config = draft.config["quantization_config"]
    config |= {"lm_head": True, "dynamic": {"-:.*layers\\.2\\.linear_attn\\.out_proj": {}, "+:.*out_proj": {"bits": 8}}}
    assert found(draft.write(tmp_path / "model")) == []
    del config["dynamic"]["+:.*out_proj"]
    assert {item.name for item in found(draft.write(tmp_path / "model"))} == {"SchemeContradicted"}
