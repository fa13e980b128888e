"""A real VllmConfig, cache config and scheduler of any class, without weights or a device.

The scheduler under test sees what it would see in an engine core: the published model's text configuration, real
scheduler options, real block accounting and prefix caching.  One thing is simplified: all cached tokens belong to one
group of full attention with the model's block size, where the real engine has one more group per recurrent layer.
Those hold one block a request whatever its length, so that they decide how many fit, not who runs when.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from .model import TEXT_CONFIG

#: tokens; what block alignment arrives at for bf16 K/V of this model
BLOCK = 1568
UPSTREAM_ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
UPSTREAM_SYNC = "vllm.v1.core.sched.scheduler.Scheduler"


@dataclass(frozen=True)
class Serving:
    """The options of `vllm serve` that a scheduler reads.

    Attributes:
        scheduler: the scheduler class or its dotted name.
        stages: pipeline stages.
        pool_tokens: tokens that the cache holds; rounded down to blocks.
        asynchronous: a step may be scheduled before the one before it has returned its tokens.
        options: further fields of vLLM's SchedulerConfig, by its names.
        additional: vLLM's `--additional-config`, by key.
    """

    scheduler: str | type = UPSTREAM_ASYNC
    stages: int = 6
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    pool_tokens: int = 4_000_000
    asynchronous: bool = True
    options: tuple[tuple[str, object], ...] = ()
    additional: tuple[tuple[str, object], ...] = ()

    @property
    def depth(self) -> int:
        """Micro-batches that the engine core lets be in flight, as VllmConfig.max_concurrent_batches counts them."""
        return self.stages + 1 if self.asynchronous else self.stages


def vllm_config(serving: Serving) -> VllmConfig:
    """The configuration an engine core would have; the model's directory holds nothing but its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TEXT_CONFIG))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            pipeline_parallel_size=serving.stages,
            distributed_executor_backend="mp",
            max_num_seqs=serving.max_num_seqs,
            max_num_batched_tokens=serving.max_num_batched_tokens,
            long_prefill_token_threshold=serving.long_prefill_token_threshold,
            max_model_len=TEXT_CONFIG["max_position_embeddings"],
            enable_prefix_caching=True,
        ).create_engine_config()
    # The CPU platform turns this off for its own workers; here no worker runs.
    config.scheduler_config.async_scheduling = serving.asynchronous
    for name, value in serving.options:
        if not hasattr(config.scheduler_config, name):
            raise ValueError(f"SchedulerConfig has no field {name!r}")
        setattr(config.scheduler_config, name, value)
    config.additional_config = dict(serving.additional)
    config.cache_config.block_size = BLOCK
    config.cache_config.mamba_cache_mode = "none"
    config.cache_config.num_gpu_blocks = serving.pool_tokens // BLOCK
    return config


def cache_config(blocks: int) -> KVCacheConfig:
    """One group of `blocks` blocks of BLOCK tokens."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["attention"], spec)],
    )


def build_scheduler(serving: Serving) -> SchedulerInterface:
    config = vllm_config(serving)
    if serving.depth != config.max_concurrent_batches:
        raise RuntimeError(
            f"{serving.stages} stages: upstream keeps {config.max_concurrent_batches} micro-batches in flight, "
            f"this model {serving.depth}; Serving.depth must follow VllmConfig.max_concurrent_batches"
        )
    named = isinstance(serving.scheduler, str)
    return (resolve_obj_by_qualname(serving.scheduler) if named else serving.scheduler)(
        vllm_config=config,
        kv_cache_config=cache_config(config.cache_config.num_gpu_blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


class Requests:
    """Makes vLLM requests; those of one `prompt` number share their tokens, and so their cached blocks."""

    def __init__(self) -> None:
        digest = get_hash_fn_by_name("sha256")
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(BLOCK, digest)

    def make(self, name: str, prompt: int, tokens: int, output: int, arrival_s: float, priority: int = 0) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=tokens_of(prompt, tokens),
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            arrival_time=arrival_s,
            priority=priority,
            block_hasher=self._hasher,
        )


def tokens_of(prompt: int, length: int) -> Sequence[int]:
    """Any tokens that differ between prompts."""
    return [prompt + 1] * length
