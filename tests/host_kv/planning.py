"""The real planner on the real model's shapes, with K/V in host memory. No model, no GPU, none of the memory."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import Qwen4ExpTextConfig

from tests.pipeline_parallel.geometry import KV, Sizes, gdn_spec, layer_specs, text_config
from tests.pipeline_parallel.planner import engine_config
from vllm import envs
from vllm.config import AttentionConfig
from vllm.config.qsa import QSAConfig
from vllm.models.qwen4_exp.qsa.formats import BF16, INT8, KVFormat
from vllm.models.qwen4_exp.qsa.host_kv import budget
from vllm.models.qwen4_exp.qsa.host_kv.blocks import filling_block, key_bytes
from vllm.models.qwen4_exp.qsa.host_kv.spec import spec_on_gpu
from vllm.models.qwen4_exp.stages import plan_stages
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, get_kv_quant_mode

GIB = 1 << 30


def engine(
    stages: int, context: int | None = None, max_gib: float | None = None, index_keys: str = "auto"
) -> SimpleNamespace:
    """What planning reads of a VllmConfig, with kv_offload."""
    config = engine_config(stages)
    config.attention_config = AttentionConfig(indexer_kv_dtype=index_keys)
    config.model_config.hf_text_config = text_config()
    if context is not None:
        config.model_config.max_model_len = config.model_config.original_max_model_len = context
    config.parallel_config.distributed_executor_backend = "mp"
    config.qsa_config = QSAConfig(kv_offload=True, kv_offload_max_gib=max_gib, arena_bytes=96 << 20)
    return config


def of_a_rank(ranks: int) -> Qwen4ExpTextConfig:
    """The published model as one of so many tensor-parallel ranks has it; a head is never divided."""
    heads = {"num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 48}
    return text_config(**{name: max(1, number // ranks) for name, number in heads.items()})


def stage_specs(
    config: SimpleNamespace, layers: range, block: int, cache_dtype: str = "auto"
) -> dict[str, KVCacheSpec]:
    """Cache specs of one stage by layer name, as its worker reports them."""
    sizes = Sizes(block=block, padded_page=None)
    fp8 = config.attention_config.indexer_kv_dtype == "fp8"
    kv = KV(cache_dtype, index_keys=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    return {
        name: spec_on_gpu(SimpleNamespace(), config, spec) if is_rows(spec) else spec
        for name, spec in layer_specs(config.model_config.hf_text_config, layers, sizes, kv=kv).items()
    }


def is_rows(spec: KVCacheSpec) -> bool:
    return isinstance(spec, FullAttentionSpec) and not isinstance(spec, MLAAttentionSpec)


@contextmanager
def machine(partition: str | None = None, host: int = 1 << 50):
    """A partition, and a machine with so much free host memory (bytes)."""
    with (
        mock.patch.dict(envs.environment_variables, VLLM_PP_LAYER_PARTITION=lambda: partition),
        mock.patch.object(budget, "available_bytes", lambda: host),
        mock.patch.object(budget.current_platform, "is_cpu", lambda: False),
    ):
        yield


class HostPlan:
    """The planner's result: block size, what each worker reports, and its cache config.

    `memory` is each worker's for its KV cache, in bytes; `ranks` are the tensor-parallel ones of each stage, whose
    workers follow one another; `cache_dtype` is of rows.
    """

    def __init__(
        self,
        stages: int,
        memory: int,
        partition: str | None = None,
        ranks: int = 1,
        cache_dtype: str = "auto",
        **limits,
    ) -> None:
        host = limits.pop("host", 1 << 50)
        with machine(partition, host):
            self.engine = engine(stages, **limits)
            self.engine.parallel_config.tensor_parallel_size = ranks
            self.engine.model_config.hf_text_config = of_a_rank(ranks)
            self.stages = plan_stages(self.engine.model_config.hf_text_config, stages)
            most = max(len(stage.qsa_layers) for stage in self.stages)
            # The engine core plans before it hears of the block size that its workers chose.
            self.state = gdn_spec(self.engine.model_config.hf_text_config, Sizes(padded_page=None)).page_size_bytes
            self.block = filling_block(self.state, most, key_bytes(self.engine), 16)
            register_all_kvcache_specs(self.engine)
            self.specs = [
                stage_specs(self.engine, stage.layers, self.block, cache_dtype)
                for stage in self.stages
                for _ in range(ranks)
            ]
            self.groups = get_global_kv_cache_groups(self.engine, self.specs)
            self.workers = get_kv_cache_configs(self.engine, self.specs, [memory] * len(self.specs), self.groups)

    @property
    def blocks(self) -> int:
        (blocks,) = {worker.num_blocks for worker in self.workers}
        return blocks

    @property
    def tokens(self) -> int:
        """Longest context of one request: all blocks but the null block and one for each group of states."""
        return (self.blocks - len(self.groups)) * self.block

    def host_bytes(self, worker: int) -> int:
        """Host memory of one worker's rows."""
        return self.blocks * budget.host_block_bytes(self.workers[worker].kv_cache_groups)


def rows(block: int = 64, heads: int = 2, width: int = 16, form: KVFormat = BF16) -> FullAttentionSpec:
    """K/V of a small layer."""
    spec = FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=width,
        dtype=form.dtype,
        kv_quant_mode=get_kv_quant_mode("int8_per_token_head" if form is INT8 else "auto"),
    )
    return TritonAttentionBackend.customize_spec(spec) if form is INT8 else spec
