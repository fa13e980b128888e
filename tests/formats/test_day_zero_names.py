"""Files that name the model as on the day of its release are read as the model that it is."""

import json

import pytest
from transformers import Qwen4ExpConfig, Qwen4ExpTextConfig

from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.qwen3_8_flash_next import renamed

TEXT = {
    "model_type": "qwen3_8_flash_next_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "output_gate_type": "sigmoid",
    "hidden_size": 256,
    "ple_layer_ids": [2],
    "eos_token_id": 248044,
    "mtp_num_hidden_layers": 1,
}
WHOLE = {
    "architectures": ["Qwen3_8_FlashNextForConditionalGeneration"],
    "model_type": "qwen3_8_flash_next",
    "text_config": TEXT,
    "vision_config": {"model_type": "qwen3_8_flash_next", "depth": 2},
}


def read(config: dict, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return get_config(str(folder), trust_remote_code=False)


def test_whole_model(tmp_path):
    config = read(WHOLE, tmp_path)
    assert type(config) is Qwen4ExpConfig
    assert config.model_type == "qwen4_exp"
    assert config.architectures == ["Qwen4ExpForConditionalGeneration"]
    assert type(config.text_config) is Qwen4ExpTextConfig
    assert config.text_config.model_type == "qwen4_exp_text"
    assert config.text_config.layer_types[3] == "indexed_attention"
    assert config.text_config.mtp_num_hidden_layers == 1
    assert config.vision_config.model_type == "qwen4_exp_vision"


@pytest.mark.parametrize("name", ["Qwen3_8FlashNextForCausalLM", "Qwen3_8_FlashNextForCausalLM"])
def test_text_model(tmp_path, name):
    config = read(TEXT | {"architectures": [name]}, tmp_path)
    assert type(config) is Qwen4ExpTextConfig
    assert (config.model_type, config.architectures) == ("qwen4_exp_text", ["Qwen4ExpForCausalLM"])
    assert config.hidden_size == 256


def test_same_as_under_todays_names(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    one, other = read(WHOLE, old).to_dict(), read(renamed(WHOLE), new).to_dict()
    assert one.pop("_name_or_path") != other.pop("_name_or_path")
    assert one == other


def test_the_file_stays_as_it_was():
    before = json.dumps(WHOLE)
    renamed(WHOLE)
    assert json.dumps(WHOLE) == before


def test_quantization_survives(tmp_path):
    config = read(
        TEXT | {"architectures": ["Qwen3_8FlashNextForCausalLM"], "quantization_config": {"bits": 4}}, tmp_path
    )
    assert config.quantization_config == {"bits": 4}


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3_8FlashForCausalLM", "Qwen4ExpMTP", "Qwen3_8FlashNextish"])
def test_other_names_are_left_alone(name):
    assert renamed({"architectures": [name]}) == {"architectures": [name]}
