# SPDX-License-Identifier: Apache-2.0
"""Attention blocks that grow until their pages are as large as a linear-attention state.

All groups of layers draw blocks from one pool, so a block is as large as the largest page
of any group: here a GDN state of 3.2 MB. Upstream makes attention blocks large enough for
their K/V to fill it, which is 1,568 tokens of 2,048 bytes. Without K/V on the GPU a stage
with four sparse layers would put 1,568 x 4 x 64 bytes into each block and leave 87 % of it
empty. So the block covers as many tokens as make the sparse pages of a stage fill it.
"""

from fractions import Fraction
from math import ceil, lcm
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ...stages import plan_stages
from .spec import PLACE_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

logger = init_logger(__name__)


def filling_block(state_bytes: int, layers: int, key_bytes: Fraction, unit: int) -> int:
    """The fewest tokens, in multiples of ``unit``, whose sparse pages are as large as a state.

    Args:
        state_bytes: a linear-attention state of one layer.
        layers: sparse layers of the stage that has most of them.
        key_bytes: pooled key of a token in one layer.
        unit: tokens that a block has to be a multiple of.
    """
    wanted = Fraction(state_bytes, layers) - PLACE_BYTES
    return max(1, ceil(wanted / (key_bytes * unit))) * unit


def grow_attention_blocks(platform: Any, vllm_config: "VllmConfig", backend: "type[AttentionBackend]") -> None:
    """Set the block sizes of a model whose K/V is in host memory.

    A block size that the user asked for stays if it is larger. The result depends on the
    configuration alone, so that all stages agree.

    Args:
        platform: the Platform class that aligns block sizes.
        vllm_config: its cache_config is changed.
        backend: of the attention layers.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    stages = plan_stages(model.hf_text_config, vllm_config.parallel_config.pipeline_parallel_size)
    block = filling_block(
        state_bytes(vllm_config),
        max(len(stage.qsa_layers) for stage in stages),
        key_bytes(vllm_config),
        unit := block_unit(platform, vllm_config, backend),
    )
    # A block never holds more than one request's tokens: beyond the longest, only host memory grows.
    block = min(block, -(-model.max_model_len // unit) * unit)
    if cache.user_specified_block_size:
        block = max(block, -(-cache.block_size // unit) * unit)
    logger.info_once(
        "K/V in host memory: attention blocks of %d tokens, so that the pooled keys of a stage fill a block.", block
    )
    cache.block_size = block
    # States are not padded: the planner takes pages of different sizes, and the largest group decides.
    cache.mamba_page_size_padded = None
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = block


def state_bytes(vllm_config: "VllmConfig") -> int:
    """The largest state of a linear layer, on one tensor-parallel rank."""
    from vllm.model_executor.models import ModelRegistry

    model = vllm_config.model_config
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    return max(spec.page_size_bytes for spec in model_class.get_mamba_specs_from_config(vllm_config))


def key_bytes(vllm_config: "VllmConfig") -> Fraction:
    """Pooled key of one token in one layer; every tensor-parallel rank holds all of it."""
    config = vllm_config.model_config.hf_text_config
    width = 1 if vllm_config.attention_config.resolve_indexer_kv_dtype("bf16") == "fp8" else 2
    return Fraction(int(config.indexer_head_dim) * width, int(config.indexer_compress_ratio))


def block_unit(platform: Any, vllm_config: "VllmConfig", backend: "type[AttentionBackend]") -> int:
    """Tokens that a block is a multiple of: every backend's kernel block, and where states may be kept."""
    from vllm.config.vllm import set_current_vllm_config
    from vllm.model_executor.layers.mamba.abstract import get_mamba_prefill_checkpoint_alignment
    from vllm.v1.attention.backend import MultipleOf

    with set_current_vllm_config(vllm_config):
        sizes = [b.get_supported_kernel_block_sizes() for b in (backend, *platform._find_non_ssm_backends(vllm_config))]
    unit = lcm(*(min(s.base if isinstance(s, MultipleOf) else s for s in some) for some in sizes if some))
    unit = lcm(unit, int(vllm_config.model_config.hf_text_config.indexer_compress_ratio))
    if vllm_config.cache_config.mamba_cache_mode == "align":
        unit = lcm(unit, get_mamba_prefill_checkpoint_alignment(vllm_config) or 1)
    return unit
