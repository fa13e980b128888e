"""A table that is larger than the memory it would be pinned in is left in its files, unless somebody insists."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from demo.checkpoint.geometry import geometry
from demo.checkpoint.table_formats import recode
from demo.checkpoint.write import build
from vllm.ampere.checkpoint.config import table_config
from vllm.config import EngramConfig, LoadConfig
from vllm.models.qwen4_exp.ple_store import fits, settings

#: of the small checkpoint: 9216 rows of 16 values
ROWS, VALUES = 9216, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fits") / "model"
    build(folder, geometry("tiny"))
    return folder


def model(folder):
    return SimpleNamespace(
        model=str(folder), architecture="Qwen4ExpForCausalLM", hf_text_config=AutoConfig.from_pretrained(folder)
    )


@pytest.fixture
def resolved(monkeypatch, checkpoint):
    """``resolved(free, …)``: host_file_gather on a GPU's machine with so many bytes free."""

    def resolve(free: int, backend="mp", nnodes=1, folder=checkpoint, **engram) -> bool:
        cuda = SimpleNamespace(device_name="cuda", is_cuda=lambda: True, is_cpu=lambda: False)
        monkeypatch.setattr(settings, "current_platform", cuda)
        monkeypatch.setattr(settings, "is_pin_memory_available", lambda: True)
        monkeypatch.setattr(fits, "available_bytes", lambda: free)
        parallel = SimpleNamespace(
            use_ubatching=False, ubatch_size=0, distributed_executor_backend=backend, nnodes=nnodes
        )
        config = SimpleNamespace(
            engram_config=EngramConfig(**engram), load_config=LoadConfig(), parallel_config=parallel
        )
        settings.resolve_host_file_gather(config, model(folder))
        return config.engram_config.host_file_gather

    return resolve


@pytest.mark.parametrize(("form", "row"), [(None, 2 * VALUES), ("scaled", VALUES), ("row-scaled", VALUES + 4)])
def test_bytes_are_those_of_the_files(checkpoint, tmp_path, form, row):
    if form is not None:
        recode(checkpoint, tmp_path / "other", form)
        checkpoint = tmp_path / "other"
    assert fits.table_bytes(model(checkpoint)) == ROWS * row


@pytest.mark.parametrize("left_out", ["", "split_ngram_parts", "ple_embed_dim", "make_ngram_vocab_size_divisible_by"])
def test_config_json_and_the_parsed_configuration_say_the_same(checkpoint, tmp_path, left_out):
    """With one list of what a key that is not there means: transformers has its own."""
    text = json.loads((checkpoint / "config.json").read_text())
    text.pop(left_out, None)
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert table_config(AutoConfig.from_pretrained(tmp_path).to_dict()) == table_config(text)


def test_a_configuration_that_was_made_smaller_is_weighed(checkpoint):
    """--hf-overrides of one key leave the lists of layers as they were."""
    smaller = model(checkpoint)
    smaller.hf_text_config.num_hidden_layers = 4
    assert fits.table_bytes(smaller) == ROWS * 2 * VALUES
    smaller.hf_text_config.ngram_size = 1
    assert fits.table_bytes(smaller) is None


def test_it_is_left_in_the_files_where_memory_is_too_small(resolved):
    assert resolved(ROWS * 2 * VALUES - 1) is True
    assert resolved(ROWS * 2 * VALUES) is False


def test_whoever_insists_gets_it(resolved):
    """And is refused with the figures where it is pinned (test_pinned.py)."""
    assert resolved(0, host_file_gather=False) is False
    assert resolved(0, cpu_offload=False) is False


def test_memory_of_other_machines_is_not_known(resolved):
    assert resolved(0, backend="ray") is False and resolved(0, nnodes=2) is False


def test_what_is_not_there_is_not_weighed(resolved, checkpoint, tmp_path):
    """A hub id, another model, a damaged table: others speak of it."""
    there = model(checkpoint)
    there.model = "someone/flash"
    assert fits.table_bytes(there) is None
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert fits.table_bytes(model(tmp_path)) is None
    assert fits.table_bytes(SimpleNamespace(model=str(checkpoint), hf_text_config=SimpleNamespace())) is None
