"""Capture sizes of a whole engine configuration, as EngineArgs makes it on a platform that has graphs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.pipeline_parallel.geometry import text_config
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.models.qwen4_exp import capture_sizes
from vllm.platforms import current_platform

DECODE_ONLY = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The published geometry without its n-gram layer, whose table would be looked for."""
    folder = tmp_path_factory.mktemp("model")
    config = text_config(ple_layer_ids=[]).to_dict()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen4ExpForCausalLM"]}))
    return str(folder)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What our module warns of, also when an earlier test had it warn of the same."""
    said: list[str] = []
    monkeypatch.setattr(capture_sizes, "logger", SimpleNamespace(warning_once=said.append))
    return said


@pytest.fixture
def configure(monkeypatch, model):
    """An engine configuration whose graphs the platform leaves as they were determined."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(lambda cls, config: None))

    def build(compilation: dict, **kwargs):
        args = dict(model=model, skip_tokenizer_init=True, max_model_len=4096, pipeline_parallel_size=3)
        return EngineArgs(**args, compilation_config=compilation, **kwargs).create_engine_config()

    return build


def test_four_users_with_one_size(configure, warnings):
    """The published misconfiguration: it starts as configured, and says what it costs."""
    config = configure(DECODE_ONLY | {"cudagraph_capture_sizes": [1]}, max_num_seqs=4)
    assert config.compilation_config.cudagraph_capture_sizes == [1]
    (warning,) = warnings
    assert "batches of 2 to 4 users run eagerly" in warning and "[1, 2, 3, 4] would" in warning


@pytest.mark.parametrize("sizes", [[1, 2, 4], [1, 2, 3, 4], [4]])
def test_a_list_that_holds_every_batch_stays_and_is_not_warned_about(configure, warnings, sizes):
    config = configure(DECODE_ONLY | {"cudagraph_capture_sizes": sizes}, max_num_seqs=4)
    assert config.compilation_config.cudagraph_capture_sizes == sizes
    assert not warnings


def test_a_maximum_that_leaves_batches_out(configure, warnings):
    config = configure(DECODE_ONLY | {"max_cudagraph_capture_size": 2}, max_num_seqs=6)
    assert config.compilation_config.cudagraph_capture_sizes == [1, 2]
    (warning,) = warnings
    assert "batches of 3 to 6 users" in warning


def test_defaults_are_completed(configure, warnings):
    """Six users: upstream alone captures [1, 2, 4, 6, 8]."""
    config = configure(DECODE_ONLY, max_num_seqs=6).compilation_config
    assert config.cudagraph_capture_sizes == [1, 2, 3, 4, 5, 6, 8]
    assert config.max_cudagraph_capture_size == 8
    assert config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert not warnings


def test_drafts_beyond_upstreams_largest_size(configure, warnings):
    """200 users with three drafts have 800 rows; upstream alone stops at 512."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = configure(DECODE_ONLY, max_num_seqs=200, max_num_batched_tokens=2048, speculative_config=drafts)
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert config.compilation_config.max_cudagraph_capture_size == sizes[-1] == 800
    assert {4, 8, 12, 16, 20, 24, 28, 32} < set(sizes)
    assert not warnings


def test_compile_sizes_that_refer_to_the_list(configure):
    config = configure(DECODE_ONLY | {"compile_sizes": ["cudagraph_capture_sizes"]}, max_num_seqs=3).compilation_config
    assert sorted(config.compile_sizes) == config.cudagraph_capture_sizes == [1, 2, 3, 4]


def test_no_graphs(configure, warnings):
    config = configure({"mode": 0, "cudagraph_mode": "NONE"}, max_num_seqs=4)
    assert config.compilation_config.cudagraph_capture_sizes == []
    config = configure(DECODE_ONLY, max_num_seqs=4, enforce_eager=True)
    assert config.compilation_config.cudagraph_capture_sizes == []
    assert not warnings
