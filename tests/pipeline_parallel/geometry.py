"""The real model's numbers, as the planner sees them: layer kinds, cache specs, no weights.

Every layer's spec is what its own `get_kv_cache_spec` returns at TP=1 without speculation, as the layer's backend
adjusts it, written out because the classes that own those methods cannot be built without a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Qwen4ExpTextConfig

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.models.qwen4_exp.common.qsa_cache import QSAStateBackend
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    get_kv_quant_mode,
)

# Block alignment's outcome for BF16 K/V: the smallest multiple of 16 tokens whose 2048 B a token cover a GDN state.
BLOCK = 1568
GDN_PAGE = 3_207_168
PADDED_PAGE = 3_211_264
CONTEXT = 262_144


def text_config(**changes) -> Qwen4ExpTextConfig:
    """The published text config, with fields replaced by `changes`."""
    fields = dict(
        num_hidden_layers=48,
        full_attention_interval=4,
        hidden_size=2560,
        num_attention_heads=24,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_value_heads=48,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        ple_layer_ids=[2],
        ple_embed_dim=2560,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        output_gate_type="sigmoid",
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        eos_token_id=248044,
        pad_token_id=248044,
    )
    return Qwen4ExpTextConfig(**(fields | changes))


@dataclass(frozen=True)
class KV:
    """How K/V and index keys are kept: `--kv-cache-dtype`, layers that it skips, the dtype of index keys."""

    cache_dtype: str = "auto"
    skipped: tuple[int, ...] = ()
    index_keys: torch.dtype = torch.bfloat16

    def of_layer(self, layer: int) -> str:
        return "auto" if layer in self.skipped else self.cache_dtype


BF16 = KV()


@dataclass(frozen=True)
class Sizes:
    """What block alignment left in a worker's CacheConfig; tokens, tokens, bytes."""

    block: int = BLOCK
    mamba_block: int = CONTEXT
    padded_page: int | None = PADDED_PAGE


#: What alignment leaves for BF16.
ALIGNED = Sizes()


def gdn_spec(config: Qwen4ExpTextConfig, sizes: Sizes = Sizes(), mode: str = "none") -> MambaSpec:
    """Convolution window in BF16 and recurrent state in FP32, 3,207,168 B before padding."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    return MambaSpec(
        shapes=tuple(shapes),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=sizes.mamba_block,
        page_size_padded=sizes.padded_page,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=mode,
    )


def ple_spec(config: Qwen4ExpTextConfig, sizes: Sizes = Sizes(), mode: str = "none") -> MambaSpec:
    """Window of the dilated convolution over all residual streams, held in full by every TP rank."""
    reach = (config.ple_conv_kernel_size - 1) * config.ngram_size
    shapes = MambaStateShapeCalculator.short_conv_state_shape(1, config.hidden_size * config.hc_count, reach + 1)
    return MambaSpec(
        shapes=tuple(shapes),
        dtypes=(torch.bfloat16,),
        block_size=sizes.mamba_block,
        page_size_padded=sizes.padded_page,
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
        mamba_cache_mode=mode,
        tp_replicated=True,
    )


def qsa_specs(config: Qwen4ExpTextConfig, layer: int, sizes: Sizes = Sizes(), kv: KV = BF16) -> dict[str, KVCacheSpec]:
    """The three caches of a sparse layer, in the order in which the layer registers them."""
    attention = f"model.layers.{layer}.self_attn"
    cache_dtype = kv.of_layer(layer)
    ratio, width = config.indexer_compress_ratio, config.indexer_head_dim
    ring = CircularBufferSpec(block_size=ratio, num_kv_heads=1, head_size=width, head_size_v=0, dtype=torch.bfloat16)
    keys = MLAAttentionSpec(
        block_size=sizes.block, num_kv_heads=1, head_size=width, dtype=kv.index_keys, tokens_per_state=ratio
    )
    main = FullAttentionSpec(
        block_size=sizes.block,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        head_size_v=config.head_dim,
        dtype=torch.bfloat16 if cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache_dtype],
        kv_quant_mode=get_kv_quant_mode(cache_dtype),
    )
    # The side caches' backend has the pages of the main one, whose module needs a GPU build to import.
    main = QSAStateBackend.customize_spec(main)
    return {
        f"{attention}.indexer.raw_key_cache": ring,
        f"{attention}.indexer.compressed_key_cache": keys,
        f"{attention}.attn": main,
    }


def layer_specs(
    config: Qwen4ExpTextConfig, layers: range, sizes: Sizes = Sizes(), mode: str = "none", kv: KV = BF16
) -> dict[str, KVCacheSpec]:
    """Cache specs of one stage by layer name, as its worker reports them."""
    specs: dict[str, KVCacheSpec] = {}
    for layer in layers:
        if layer + 1 in config.ple_layer_ids:
            specs[f"model.layers.{layer}.ple"] = ple_spec(config, sizes, mode)
        if config.layer_types[layer] == "linear_attention":
            specs[f"model.layers.{layer}.linear_attn"] = gdn_spec(config, sizes, mode)
        else:
            specs |= qsa_specs(config, layer, sizes, kv)
    return specs


def layer_of(name: str) -> int:
    """The decoder layer that a cache belongs to."""
    return int(name.split(".")[2])
