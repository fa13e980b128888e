# SPDX-License-Identifier: Apache-2.0
"""Which `--kv-cache-dtype` the model serves, decided from the configuration alone.

Upstream refuses a dtype when the first layer is built: in a worker, after processes started and a minute went by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.models.qwen4_exp.compact_kv.choice import chosen
from vllm.models.qwen4_exp.qsa.formats import CACHE_DTYPES, kv_format
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Qwen4ExpTextConfig

    from vllm.config import CacheConfig, VllmConfig

OPTION = "--kv-cache-dtype"
SKIP_OPTION = "--kv-cache-dtype-skip-layers"

#: Refused value -> what comes nearest. Anything else packs K/V below a byte.
_NEAREST = {
    "float16": "bfloat16, which takes as many bytes",
    "fp8_e5m2": "fp8_e4m3, which takes as many bytes",
    "fp8_inc": "fp8_e4m3, which takes as many bytes",
    "fp8_ds_mla": "fp8_e4m3",
    "fp8_per_token_head": "int8_per_token_head, which takes as many bytes",
}
_SMALLEST = "int8_per_token_head or fp8, the smallest that are served"


class KVCacheSettingError(ValueError):
    """The K/V of the sparse layers cannot be kept as configured."""


class KVCacheDtypeNotServed(KVCacheSettingError):
    """`--kv-cache-dtype` names a format that no kernel of this model reads."""


class SkippedLayerWithoutKV(KVCacheSettingError):
    """`--kv-cache-dtype-skip-layers` names something that is no sparse layer, so that nothing would be skipped."""


class CheckpointKVScales(KVCacheSettingError):
    """The checkpoint brings scales for its K/V, which nothing here would read."""


def check_kv_cache(vllm_config: VllmConfig) -> None:
    """Refuse settings that would fail in the workers, or do nothing.

    Called while the configuration is built, in every process. AMD's backend has formats of its own and says itself
    which.

    Raises:
        KVCacheDtypeNotServed, SkippedLayerWithoutKV, CheckpointKVScales, UnknownKernels: in this order.
    """
    if current_platform.is_rocm():
        return
    cache_config = vllm_config.cache_config
    check_dtype(cache_config.cache_dtype)
    check_skipped(cache_config, vllm_config.model_config.hf_text_config)
    check_checkpoint(vllm_config.model_config.hf_config)
    # Stand-ins for a VllmConfig do not have every field. Layers that are skipped keep bf16.
    for cache_dtype in (
        {cache_config.cache_dtype, "auto"} if cache_config.kv_cache_dtype_skip_layers else {cache_config.cache_dtype}
    ):
        chosen(kv_format(cache_dtype).name, getattr(vllm_config, "qsa_config", None))


def check_dtype(cache_dtype: str) -> None:
    """Raises KVCacheDtypeNotServed."""
    if cache_dtype not in CACHE_DTYPES:
        raise KVCacheDtypeNotServed(
            f"{OPTION} {cache_dtype} is not served: the sparse-attention layers keep K/V in {', '.join(CACHE_DTYPES)}; "
            f"use {_NEAREST.get(cache_dtype, _SMALLEST)}"
        )


def check_checkpoint(hf_config: PretrainedConfig) -> None:
    """Raises CheckpointKVScales. The quantization object itself is made later, and refused in a worker."""
    quantization = getattr(hf_config, "quantization_config", None)
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if scheme is not None:
        raise CheckpointKVScales(
            f"the checkpoint's quantization_config has kv_cache_scheme={scheme!r}, and scales of K/V in a checkpoint are "
            f"not read; set it to null in config.json and use {OPTION} int8_per_token_head, which measures its scales, or "
            "fp8, whose scale is 1.0"
        )


def check_skipped(cache_config: CacheConfig, text_config: Qwen4ExpTextConfig) -> None:
    """Raises SkippedLayerWithoutKV."""
    layers = layers_with_kv(text_config)
    for entry in cache_config.kv_cache_dtype_skip_layers:
        if entry not in map(str, layers):
            raise SkippedLayerWithoutKV(
                f"{SKIP_OPTION} names {entry!r}, which keeps no K/V, so nothing would be skipped; the layers that do are "
                f"{', '.join(map(str, layers))}"
            )


def layers_with_kv(text_config: Qwen4ExpTextConfig) -> list[int]:
    """Numbers of the sparse-attention layers, from zero; draft layers are counted after the model's."""
    kinds = text_config.layer_types
    drafts = getattr(text_config, "mtp_num_hidden_layers", None) or 1
    sparse = [layer for layer, kind in enumerate(kinds) if kind != "linear_attention"]
    return [*sparse, *range(len(kinds), len(kinds) + drafts)]
