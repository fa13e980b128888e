"""A configuration that the KV planner accepts, without a model directory or a device."""

from __future__ import annotations

from types import SimpleNamespace

from transformers import Qwen4ExpTextConfig

from vllm.config import CacheConfig
from vllm.models.qwen4_exp.stages import Stage, plan_stages
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from .geometry import ALIGNED, BF16, BLOCK, CONTEXT, KV, Sizes, layer_specs


def engine_config(pipeline_size: int, mode: str = "none", block: int = BLOCK) -> SimpleNamespace:
    """What planning reads of a VllmConfig, for TP=1. `mode` is the mamba cache mode, `block` in tokens."""
    cache = CacheConfig(block_size=block, enable_prefix_caching=mode == "align", mamba_cache_mode=mode)
    cache.kv_cache_layout = "BLNHC"
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            max_model_len=CONTEXT, original_max_model_len=CONTEXT, supports_kv_cache_grouping=False, use_mla=False
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=pipeline_size,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=2048,
    )


class Plan:
    """The planner's result for one partition: stages, what each worker reports, and its cache config."""

    def __init__(
        self,
        config: Qwen4ExpTextConfig,
        pipeline_size: int,
        partition: str | None,
        memory: int,
        sizes: Sizes = ALIGNED,
        kv: KV = BF16,
    ) -> None:
        self.engine = engine_config(pipeline_size, block=sizes.block)
        register_all_kvcache_specs(self.engine)
        self.stages: tuple[Stage, ...] = plan_stages(config, pipeline_size, partition=partition)
        self.specs: list[dict[str, KVCacheSpec]] = [
            layer_specs(config, stage.layers, sizes, kv=kv) for stage in self.stages
        ]
        self.groups: list[KVCacheGroupSpec] = get_global_kv_cache_groups(self.engine, self.specs)
        self.workers: list[KVCacheConfig] = get_kv_cache_configs(
            self.engine, self.specs, [memory] * pipeline_size, self.groups
        )


def tensor_layers(worker: KVCacheConfig) -> list[str]:
    """Every layer that some tensor of the worker has room for."""
    return [name for tensor in worker.kv_cache_tensors for name in tensor.layers]


def bytes_per_block(worker: KVCacheConfig) -> int:
    """Size of the one backing allocation over its blocks."""
    (size,) = {tensor.size for tensor in worker.kv_cache_tensors}
    assert size % worker.num_blocks == 0
    return size // worker.num_blocks
