"""The loader never reads a table that is served from its files."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config import LoadConfig
from vllm.model_executor.model_loader import needed_weights, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .conftest import watched


@pytest.fixture
def serve_from_files(monkeypatch):
    """``serve_from_files(True)``: the current config's setting."""

    def configure(value: bool | None) -> None:
        config = SimpleNamespace(engram_config=SimpleNamespace(host_file_gather=value))
        monkeypatch.setattr(needed_weights, "get_current_vllm_config_or_none", lambda: config)

    return configure


@pytest.fixture
def read_tensors(monkeypatch):
    """Names of the tensors that anybody takes out of a safetensors file."""
    names = []
    monkeypatch.setattr(weight_utils, "safe_open", watched(lambda name, tensor: names.append(name)))
    return names


def load(written, model=None, **settings):
    """What the default loader would hand to a model."""
    loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False, **settings))
    model_config = SimpleNamespace(model=str(written.folder), revision=None)
    return dict(loader.get_all_weights(model_config, model or torch.nn.Module()))


@pytest.mark.parametrize("strategy", [None, "lazy", "prefetch"])
def test_the_table_is_not_read(write_table, serve_from_files, read_tensors, strategy):
    written = write_table()
    serve_from_files(True)
    weights = load(written, safetensors_load_strategy=strategy)
    assert sorted(weights) == [f"model.language_model.layers.{i}.other" for i in (0, 2, 4)]
    assert sorted(read_tensors) == sorted(weights)


@pytest.mark.parametrize("value", [False, None])
def test_a_table_in_memory_is_read(write_table, serve_from_files, read_tensors, value):
    written = write_table()
    serve_from_files(value)
    assert len(load(written)) == 3 + 5
    assert len(read_tensors) == 3 + 5


def test_files_of_nothing_but_the_table_are_not_prefetched(write_table, serve_from_files, monkeypatch):
    written = write_table()
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"
    only = written.folder / "table-only.safetensors"
    from safetensors.torch import save_file

    save_file({name: torch.zeros(2, 2)}, only)
    (written.folder / "model.safetensors.index.json").unlink()
    prefetched = []
    monkeypatch.setattr(weight_utils, "_prefetch_all_checkpoints", lambda files, **_: prefetched.extend(files))
    serve_from_files(True)
    load(written, safetensors_load_strategy="prefetch")
    assert sorted(prefetched) == sorted(map(str, written.files))
    del prefetched[:]
    serve_from_files(False)
    load(written, safetensors_load_strategy="prefetch")
    assert str(only) in prefetched


def test_a_models_own_filter_stays(serve_from_files):
    model = SimpleNamespace(is_unused_checkpoint_weight=lambda name: name == "mtp.x")
    table = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_17.weight"
    serve_from_files(True)
    unused = needed_weights.unused_weight_filter(model)
    assert unused("mtp.x") and unused(table) and not unused("lm_head.weight")
    serve_from_files(False)
    assert needed_weights.unused_weight_filter(model)("mtp.x") and not needed_weights.unused_weight_filter(model)(table)
    assert needed_weights.unused_weight_filter(torch.nn.Module()) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight", True),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.shard_511.weight", True),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.weight", True),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale", True),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight_scale", True),
        ("model.layers.1.ple.ple_embedding.ngram_heads_offsets", False),
        ("model.layers.1.ple.key_proj.weight", False),
        ("model.embed_tokens.weight", False),
    ],
)
def test_names(name, expected):
    assert needed_weights.is_ple_table(name) is expected


def test_without_a_config_nothing_is_skipped():
    assert not needed_weights.skips_weight("layers.1.ple.ple_embedding.ngram_embedding.weight")
