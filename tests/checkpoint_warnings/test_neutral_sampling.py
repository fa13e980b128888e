"""A model without sampling parameters, through upstream's own method."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.pipeline_parallel.geometry import text_config
from vllm.config import ModelConfig, neutral_sampling


@pytest.fixture
def said(monkeypatch) -> list[str]:
    texts: list[str] = []
    logger = SimpleNamespace(warning_once=lambda text, *args: texts.append(text % args))
    monkeypatch.setattr(neutral_sampling, "logger", logger)
    return texts


@pytest.fixture
def sampling(tmp_path):
    """Default sampling parameters of a model with the given generation config."""
    config = text_config(ple_layer_ids=[]).to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def of(found: dict | None, **kwargs) -> dict:
        if found is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(found))
        return ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, **kwargs).get_diff_sampling_param()

    return of


@pytest.mark.parametrize("found", [None, {}, {"eos_token_id": 1, "do_sample": True}], ids=["none", "empty", "ids only"])
def test_no_sampling_parameters(sampling, said, tmp_path, found):
    assert sampling(found) == {}
    (warning,) = said
    assert str(tmp_path) in warning and neutral_sampling.EXAMPLE in warning


def test_a_folder_without_them_is_named(sampling, said, tmp_path):
    folder = tmp_path / "generation"
    folder.mkdir()
    (folder / "generation_config.json").write_text("{}")
    assert sampling(None, generation_config=str(folder)) == {}
    (warning,) = said
    assert str(folder) in warning


def test_one_is_enough(sampling, said):
    assert sampling({"temperature": 0.6}) == {"temperature": 0.6}
    assert not said


def test_those_of_the_command_line_count(sampling, said):
    assert sampling({}, override_generation_config={"top_p": 0.8}) == {"top_p": 0.8}
    assert not said


def test_vllms_own_defaults_as_asked_for(sampling, said):
    assert sampling({"temperature": 0.6}, generation_config="vllm") == {}
    assert not said
