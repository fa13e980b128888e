# SPDX-License-Identifier: Apache-2.0
"""Which `--kv-cache-dtype` the model serves, decided from the configuration alone.

Upstream refuses a dtype when the first layer is built: in a worker, after processes started and a minute went by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.models.qwen4_exp.compact_kv.choice import chosen
from vllm.models.qwen4_exp.qsa.formats import CACHE_DTYPES, kv_format
from vllm.models.qwen4_exp.qsa.index_keys import NARROWEST_WORDS
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Qwen4ExpTextConfig

    from vllm.config import CacheConfig, VllmConfig

logger = init_logger(__name__)

OPTION = "--kv-cache-dtype"
SKIP_OPTION = "--kv-cache-dtype-skip-layers"
INDEX_OPTION = "--attention-config.indexer_kv_dtype"

#: Index keys, by what the kernels of `../qsa/score.py` read; auto is bf16.
INDEX_DTYPES = ("auto", "bf16", "fp8")

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


class IndexKeyDtypeNotServed(KVCacheSettingError):
    """`--attention-config.indexer_kv_dtype` names a format that no kernel of this model reads."""


class IndexKeyTooNarrow(KVCacheSettingError):
    """Index keys in fp8 of a model whose keys the kernels cannot read four to a word."""


class SkippedLayerWithoutKV(KVCacheSettingError):
    """`--kv-cache-dtype-skip-layers` names something that is no sparse layer, so that nothing would be skipped."""


class CheckpointKVScales(KVCacheSettingError):
    """The checkpoint declares a format for K/V, with scales that nothing here would read, and no other was asked for."""


def check_kv_cache(vllm_config: VllmConfig) -> None:
    """Refuse settings that would fail in the workers, or do nothing.

    Called while the configuration is built, in every process. AMD's backend has formats of its own and says itself
    which.

    Raises:
        CheckpointKVScales, KVCacheDtypeNotServed, SkippedLayerWithoutKV, IndexKeyDtypeNotServed, IndexKeyTooNarrow,
            UnknownKernels: in this order. A dtype that nobody asked for may be the checkpoint's, put in place of auto.
    """
    if current_platform.is_rocm():
        return
    cache_config = vllm_config.cache_config
    check_checkpoint(vllm_config.model_config.hf_config, cache_config.cache_dtype)
    check_dtype(cache_config.cache_dtype)
    check_skipped(cache_config, vllm_config.model_config.hf_text_config)
    # Stand-ins for a VllmConfig do not have every field.
    if attention_config := getattr(vllm_config, "attention_config", None):
        check_index_keys(attention_config.indexer_kv_dtype, vllm_config.model_config.hf_text_config)
    # Layers that are skipped keep bf16.
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


def check_index_keys(dtype: str, text_config: Qwen4ExpTextConfig) -> None:
    """Raises IndexKeyDtypeNotServed, IndexKeyTooNarrow."""
    if dtype not in INDEX_DTYPES:
        nearest = "fp8, which is e4m3" if dtype == "fp8_e4m3" else "fp8, the smallest that is served"
        raise IndexKeyDtypeNotServed(
            f"{INDEX_OPTION} {dtype} is not served: the sparse-attention layers keep index keys in "
            f"{', '.join(INDEX_DTYPES)}; use {nearest}"
        )
    width = text_config.indexer_head_dim
    if dtype == "fp8" and (width % 4 or width < NARROWEST_WORDS):
        raise IndexKeyTooNarrow(
            f"{INDEX_OPTION} fp8 needs index keys of {NARROWEST_WORDS} numbers or more, a multiple of 4, and the "
            f"checkpoint's have indexer_head_dim={width}; use bf16"
        )


#: What a user who does not want the checkpoint's format asks for; neither needs a scale from the files.
_OWN_SCALES = ("bfloat16", "int8_per_token_head")


def check_checkpoint(hf_config: PretrainedConfig, cache_dtype: str) -> None:
    """Say that the checkpoint's K/V format is not used, or refuse where it would be.

    An explicit dtype wins over what a checkpoint declares, as everywhere in vLLM. Without one (auto, or what upstream
    made of it) and with fp8 the scales in the files would be due, and are not read: the numbers would be others than
    the checkpoint's author measured.

    Raises:
        CheckpointKVScales: the quantization object itself is made later, and refused in a worker.
    """
    if not (declared := declared_kv_format(getattr(hf_config, "quantization_config", None))):
        return
    if cache_dtype in _OWN_SCALES:
        logger.warning_once(
            "K/V are kept in %s, as %s asks; the checkpoint declares %s, and its scales are not used.",
            cache_dtype,
            OPTION,
            declared,
        )
        return
    raise CheckpointKVScales(
        f"the checkpoint's quantization config has {declared}, and scales of K/V in a checkpoint are not read; use "
        f"{OPTION} int8_per_token_head, which measures its scales, or bfloat16, or set the entry to null for fp8 with a "
        "scale of 1.0"
    )


def needs_checkpoint_scales(quantization: object, cache_dtype: str) -> bool:
    """Whether a layer would need them; the object's form of the question above, asked as the layer is built."""
    return getattr(quantization, "kv_cache_scheme", None) is not None and cache_dtype not in _OWN_SCALES


def declared_kv_format(quantization: Any) -> str:
    """The entry that declares a format for K/V, e.g. "kv_cache_quant_algo='FP8'"; "" without one.

    compressed-tensors and later ModelOpt have kv_cache_scheme; ModelOpt has kv_cache_quant_algo, beside the other keys
    or in an object "quantization", which is how hf_quant_config.json comes here too.
    """
    if not isinstance(quantization, dict):
        return ""
    inner = quantization.get("quantization")
    for holder in (quantization, inner if isinstance(inner, dict) else {}):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if value := holder.get(key):
                return f"{key}={value!r}"
    return ""


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
