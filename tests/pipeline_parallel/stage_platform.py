"""Stages as block alignment sees them: registered layers with backends, and the model's state sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import torch

import vllm.config.vllm as config_module
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import ModelRegistry
from vllm.models.qwen4_exp.common.qsa_cache import QSAStateBackend
from vllm.models.qwen4_exp.stages import Stage
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend

from .geometry import BF16, CONTEXT, KV, Sizes, gdn_spec, layer_specs, ple_spec, text_config


class SparseBackend(AttentionBackend):
    """Answers as the CUDA backend of the main K/V does, whose module needs a GPU build to import."""

    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "SPARSE"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("only asked about block sizes")

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError("only asked about block sizes")


def backend_of(cache_name: str) -> type[AttentionBackend]:
    if cache_name.endswith(".linear_attn"):
        return GDNAttentionBackend
    if cache_name.endswith(".ple"):
        return ShortConvAttentionBackend
    return QSAStateBackend if ".indexer." in cache_name else SparseBackend


class Layer(AttentionLayerBase):
    """A registered layer, of which alignment asks only the backend."""

    def __init__(self, backend: type[AttentionBackend]) -> None:
        self.backend = backend

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError("specs are built from the sizes afterwards")


class Model:
    """Stands for the model class, which alignment asks for its state sizes."""

    @staticmethod
    def get_mamba_specs_from_config(vllm_config):
        config = text_config()
        unpadded = Sizes(mamba_block=-1, padded_page=None)
        return gdn_spec(config, unpadded), ple_spec(config, unpadded)


def worker_config(stage: Stage, pipeline_size: int, mode: str, kv: KV = BF16) -> SimpleNamespace:
    """What alignment reads of the VllmConfig in the worker of `stage`, before it ran.

    `mode` is "align" with prefix caching and "none" without; the mamba block starts as upstream sets it then.
    """
    caching = mode == "align"
    cache = CacheConfig(
        enable_prefix_caching=caching,
        mamba_cache_mode=mode,
        cache_dtype=kv.cache_dtype,
        kv_cache_dtype_skip_layers=list(map(str, kv.skipped)),
    )
    cache.mamba_block_size = cache.block_size if caching else CONTEXT
    layers = {name: Layer(backend_of(name)) for name in layer_specs(text_config(), stage.layers)}
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            is_hybrid=True,
            use_mla=False,
            dtype=torch.bfloat16,
            architecture="Qwen4ExpForCausalLM",
            get_num_kv_heads=lambda parallel: 2,
            get_head_size=lambda: 256,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline_size),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


@contextlib.contextmanager
def alignment_without_a_model() -> Iterator[None]:
    """Upstream's alignment asks for a model class and a current configuration; here it gets stand-ins."""

    def resolved(architecture, model_config):
        return Model, architecture

    with (
        mock.patch.object(ModelRegistry, "resolve_model_cls", resolved),
        mock.patch.object(config_module, "set_current_vllm_config", lambda vllm_config: contextlib.nullcontext()),
    ):
        yield


def aligned_configs(stages: Sequence[Stage], mode: str = "none", kv: KV = BF16) -> list[SimpleNamespace]:
    """The workers' configurations after upstream's own alignment, with the defaults of a GPU platform."""
    configs = [worker_config(stage, len(stages), mode, kv) for stage in stages]
    with alignment_without_a_model():
        for config in configs:
            Platform.update_block_size_for_backend(config)
    return configs
