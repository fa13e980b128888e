"""The draft module of a quantized checkpoint: names, construction and loading.  What it drafts: tests/e2e/test_drafts.py."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.formats import mtp
from demo.checkpoint.formats.recipes import RECIPES
from demo.checkpoint.formats.rounding import round_weight
from demo.checkpoint.formats.write import MULTIMODAL, PLAIN, quantize
from demo.checkpoint.geometry import PRESETS
from demo.checkpoint.write import build
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.accounted_load import WeightsNotFilled
from vllm.models.qwen4_exp.draft_quantization import rename_draft_modules


def test_names():
    config = SimpleNamespace(
        ignore=[
            "mtp.layers.0.mlp.gate",
            "model.layers.0.mlp.gate",
            "mtp.fc_hidden",
            r"re:.*mtp\.layers\.1\..*inject.*",
        ],
        target_scheme_map={
            r"re:^mtp\.layers\.0\.self_attn\..*": 1,
            "model.language_model.embed_tokens": 2,
            "Linear": 3,
        },
        modules_in_block_to_quantize=[
            "mtp.layers.0.self_attn.q_proj",
            "model.language_model.layers.3.self_attn.q_proj",
        ],
        dynamic={r"+:.*mtp\.layers\.0\.mlp.*": {"bits": 8}},
    )
    rename_draft_modules(config, 48)
    assert config.ignore == [
        "mtp.layers.48.mlp.gate",
        "model.layers.0.mlp.gate",
        "mtp.fc_hidden",
        r"re:.*mtp\.layers\.49\..*inject.*",
    ]
    assert config.target_scheme_map == {r"re:^mtp\.layers\.48\.self_attn\..*": 1, "model.embed_tokens": 2, "Linear": 3}
    assert config.modules_in_block_to_quantize == ["mtp.layers.48.self_attn.q_proj", "model.layers.3.self_attn.q_proj"]
    assert config.dynamic == {r"+:.*mtp\.layers\.48\.mlp.*": {"bits": 8}}


def test_nothing_to_rename():
    rename_draft_modules(None, 48)
    rename_draft_modules(SimpleNamespace(ignore=[], dynamic=None), 48)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "bf16"
    build(folder, PRESETS["groups"])
    return folder


@pytest.fixture
def no_accelerator(monkeypatch):
    """The loader tidies the accelerator's memory; the CPU worker replaces these too."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)


def load_draft(checkpoint, **arguments):
    draft = EngineArgs(
        model=str(checkpoint),
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        **arguments,
    ).create_engine_config()
    with set_current_vllm_config(draft):
        return get_model(vllm_config=draft, model_config=draft.speculative_config.draft_model_config)


@pytest.mark.parametrize("lost", ["mlp.experts.1.down_proj", "self_attn.k_proj"])
def test_a_part_that_is_not_filled_is_an_error(lost, source, tmp_path, world, no_accelerator):
    """One expert of many, or one of q, k and v: the parameter that it is a part of is loaded, by its name."""
    checkpoint = quantize(source, tmp_path, RECIPES["mix"], prefix=PLAIN, with_mtp=True).quantized
    index = checkpoint / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name = next(name for name in listed["weight_map"] if name.startswith(f"mtp.layers.0.{lost}.weight"))
    file = checkpoint / listed["weight_map"].pop(name)
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    index.write_text(json.dumps(listed))
    with pytest.raises(WeightsNotFilled, match="of the draft module were not filled.*model.layers.0.*values, from"):
        load_draft(checkpoint, additional_config={"checkpoint_check": "off"})


@pytest.mark.parametrize(("recipe", "prefix"), [("mix", PLAIN), ("gptq-g32", MULTIMODAL)])
def test_loads(recipe, prefix, source, tmp_path, world, no_accelerator):
    rules = RECIPES[recipe]
    pair = quantize(source, tmp_path, rules, prefix=prefix, with_mtp=True)
    model = load_draft(pair.quantized)
    held = dict(model.named_parameters())
    layer = "model.layers.0"
    packed = "qweight" if recipe.startswith("gptq") else "weight_packed"
    assert f"{layer}.self_attn.o_proj.{packed}" in held
    assert held[f"{layer}.self_attn.indexer.index_qk_proj.weight"].dtype == torch.bfloat16
    assert (f"{layer}.attn_hyper_connection.block_inject_weight.weight" in held) == (recipe == "mix")
    if recipe != "mix":
        return
    # On the CPU the packed widths that it cannot multiply are dense by now, and must be what the files stand for.
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    sparse = "model.layers.3"  # which the draft's layer is a copy of

    def stands_for(name: str) -> torch.Tensor:
        weight = load_file(source / index[f"{name}.weight"])[f"{name}.weight"]
        return round_weight(weight, rules.scheme(name), torch.bfloat16).dequantized()

    for name in ("self_attn.o_proj", "attn_hyper_connection.input_mix_weight_down", "mlp.shared_expert.down_proj"):
        assert torch.equal(held[f"{layer}.{name}.weight_packed"], stands_for(f"{sparse}.{name}")), name
    assert torch.equal(held["lm_head.weight_packed"], stands_for("lm_head"))
    assert torch.equal(model.model.embed_tokens(torch.tensor([5, 300])), stands_for("model.embed_tokens")[[5, 300]])


def test_a_plain_one_loads(source, tmp_path, world, no_accelerator):
    """In BF16, beside a plain checkpoint: nothing of it is taken for a hole."""
    shutil.copytree(source, tmp_path / "plain")
    mtp.add(tmp_path / "plain")
    assert "model.layers.0.self_attn.o_proj.weight" in dict(load_draft(tmp_path / "plain").named_parameters())
