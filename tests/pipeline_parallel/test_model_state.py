"""The model state of a rank in a pipeline, where upstream refuses to build one."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from .geometry import text_config


@pytest.mark.parametrize("platform", ["nvidia", "amd"])
def test_ngram_context_exists_on_every_stage(platform, monkeypatch):
    def minimal(self, vllm_config, model, encoder_cache, device):
        self.model_config, self.max_num_reqs, self.device = vllm_config.model_config, 5, device

    monkeypatch.setattr(MambaHybridModelState, "__init__", minimal)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text_config()),
        parallel_config=SimpleNamespace(pipeline_parallel_size=3),
    )
    module = importlib.import_module(f"vllm.models.qwen4_exp.{platform}.model_state")
    state = module.Qwen4ExpModelState(vllm_config, torch.nn.Module(), None, torch.device("cpu"))
    # Three-grams look back two tokens, for each of the five requests.
    assert state.ngram_context.shape == (5, 2)
