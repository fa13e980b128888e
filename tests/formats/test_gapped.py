"""Words with gaps, as compressed-tensors 0.17 packs them itself, without them."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from demo.checkpoint import mixes
from demo.checkpoint.sparse import published
from tests.ampere.drafts import Draft
from vllm.model_executor.model_loader.gapped_weights import gapped, repacked
from vllm.utils import packed_words
from vllm.utils.packed_words import pack_rows, without_gaps


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("columns", [64, 320, 37, 1])
def test_the_same_values_without_gaps(bits, columns):
    offset = 1 << (bits - 1)
    values = torch.randint(-offset, offset, (7, columns), dtype=torch.int8)
    assert torch.equal(without_gaps(pack_to_int32(values, bits), bits, columns), pack_rows(values + offset, bits))


def test_rows_in_passes(monkeypatch):
    values = torch.randint(-32, 32, (7, 64), dtype=torch.int8)
    whole = without_gaps(pack_to_int32(values, 6), 6, 64)
    monkeypatch.setattr(packed_words, "_PASS", 3 * 64)
    assert torch.equal(without_gaps(pack_to_int32(values, 6), 6, 64), whole)


def test_another_width_is_an_error():
    with pytest.raises(ValueError, match=r"64 values of 6 bits take rows of 13 words with gaps, not \[2, 12\]"):
        without_gaps(torch.zeros(2, 12, dtype=torch.int32), 6, 64)


@pytest.fixture
def loose(tmp_path):
    draft = Draft.mixed()
    draft.tensors = published(draft.config, mixes.autoround_loose)
    draft.write(tmp_path / "loose")
    return tmp_path / "loose"


def test_only_weights_with_gaps_are_touched(loose):
    widths = gapped(str(loose))
    name = "model.layers.0.linear_attn.in_proj_qkv.weight_packed"
    assert widths[name] == (6, 256)
    assert all(".linear_attn." in n or ".self_attn." in n or ".shared_expert." in n for n in widths)
    weights = [(name, torch.zeros(3, 52, dtype=torch.int32)), ("model.norm.weight", torch.zeros(4))]
    assert [tensor.shape for _, tensor in repacked(weights, str(loose))] == [(3, 48), (4,)]


@pytest.mark.parametrize(
    "edit", [lambda c: c.update(architectures=["LlamaForCausalLM"]), lambda c: c.pop("hidden_size")]
)
def test_another_model_and_a_broken_one_are_left_alone(loose, edit):
    file = loose / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))
    weights = [("a", torch.zeros(1))]
    assert repacked(weights, str(loose)) is weights
