"""Every K/V setting that is not served is refused while the configuration is built, with the way out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.pipeline_parallel.geometry import text_config
from vllm.config import AttentionConfig, CacheConfig
from vllm.config.cache import KV_CACHE_DTYPES
from vllm.config.qsa import QSAConfig
from vllm.models.qwen4_exp.compact_kv import settings
from vllm.models.qwen4_exp.compact_kv.choice import UnknownKernels, chosen
from vllm.models.qwen4_exp.compact_kv.settings import (
    INDEX_DTYPES,
    CheckpointKVScales,
    IndexKeyDtypeNotServed,
    IndexKeyTooNarrow,
    KVCacheDtypeNotServed,
    SkippedLayerWithoutKV,
    check_kv_cache,
    layers_with_kv,
    needs_checkpoint_scales,
)
from vllm.models.qwen4_exp.qsa.formats import CACHE_DTYPES
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string


def configured(cache_dtype="auto", skipped=(), quantization=None, kernels=None):
    """What the check reads of a VllmConfig."""
    hf_config = SimpleNamespace(quantization_config=quantization) if quantization else SimpleNamespace()
    return SimpleNamespace(
        cache_config=CacheConfig(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skipped)),
        model_config=SimpleNamespace(hf_config=hf_config, hf_text_config=text_config()),
        qsa_config=QSAConfig(kernels=kernels) if kernels else None,
    )


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_served_formats_pass(cache_dtype):
    check_kv_cache(configured(cache_dtype, ["3", "47"]))


@pytest.mark.parametrize("cache_dtype", [name for name in KV_CACHE_DTYPES if name not in CACHE_DTYPES])
def test_every_other_format_of_upstream_is_refused(cache_dtype):
    with pytest.raises(KVCacheDtypeNotServed) as refusal:
        check_kv_cache(configured(cache_dtype))
    said, way_out = str(refusal.value).split("; use ")
    assert f"--kv-cache-dtype {cache_dtype} is not served" in said
    assert any(served in way_out for served in CACHE_DTYPES[1:])


@pytest.mark.parametrize(
    ("cache_dtype", "instead"),
    [
        ("int4_per_token_head", "int8_per_token_head"),
        ("nvfp4", "int8_per_token_head"),
        ("fp8_per_token_head", "int8_per_token_head"),
        ("fp8_e5m2", "fp8_e4m3"),
        ("float16", "bfloat16"),
    ],
)
def test_the_way_out_is_the_nearest_format(cache_dtype, instead):
    with pytest.raises(KVCacheDtypeNotServed, match=f"; use {instead}"):
        check_kv_cache(configured(cache_dtype))


def test_layers_that_keep_kv():
    assert layers_with_kv(text_config()) == [*range(3, 48, 4), 48]
    assert layers_with_kv(text_config(mtp_num_hidden_layers=3))[-3:] == [48, 49, 50]


@pytest.mark.parametrize("entry", ["4", "49", "-1", "3.0", "sliding_window"])
def test_skipping_a_layer_without_kv_is_refused(entry):
    with pytest.raises(SkippedLayerWithoutKV, match=rf"'{entry}'.*layers that do are 3, 7, .*, 47, 48$"):
        check_kv_cache(configured("fp8", ["3", entry]))


FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
DECLARED = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FP8_SCHEME},
    "modelopt, by algorithm": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "modelopt, nested": {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}},
    "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}},
}


@pytest.fixture
def warned(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(settings.logger, "warning_once", lambda text, *values: texts.append(text % values))
    return texts


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_e4m3", "nvfp4"])
def test_scales_of_a_checkpoint_are_refused(name, cache_dtype, warned):
    """Also where upstream has put the checkpoint's format in place of auto, which nobody asked for."""
    with pytest.raises(CheckpointKVScales) as refusal:
        check_kv_cache(configured(cache_dtype, quantization=DECLARED[name]))
    said, way_out = str(refusal.value).split("; use ")
    assert ("kv_cache_scheme={'num_bits': 8" in said) or ("kv_cache_quant_algo='" in said)
    assert way_out.startswith("--kv-cache-dtype int8_per_token_head") and "bfloat16" in way_out and "null" in way_out
    assert not warned


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8_per_token_head"])
def test_an_explicit_format_wins_over_a_checkpoints(name, cache_dtype, warned):
    check_kv_cache(configured(cache_dtype, quantization=DECLARED[name]))
    (text,) = warned
    assert f"kept in {cache_dtype}, as --kv-cache-dtype asks" in text and "kv_cache_" in text


@pytest.mark.parametrize("name", DECLARED)
def test_an_entry_that_is_null_declares_nothing(name, warned):
    def emptied(held):
        empty = {key: None for key in held if key.startswith("kv_cache_")}
        return held | empty | {key: emptied(held[key]) for key in held if key == "quantization"}

    check_kv_cache(configured("fp8", quantization=emptied(DECLARED[name])))
    assert not warned


def test_the_layer_asks_the_same():
    quantized, plain = SimpleNamespace(kv_cache_scheme=FP8_SCHEME), SimpleNamespace(kv_cache_scheme=None)
    assert [needs_checkpoint_scales(quantized, name) for name in CACHE_DTYPES] == [
        name not in ("bfloat16", "int8_per_token_head") for name in CACHE_DTYPES
    ]
    assert not any(needs_checkpoint_scales(held, "fp8") for held in (plain, None))


def test_upstream_puts_the_checkpoints_format_in_place_of_auto():
    """Of ModelOpt's configs; it is why a dtype that nobody asked for is seen here."""
    hf_config = SimpleNamespace(quantization_config=DECLARED["modelopt, by algorithm"])
    assert resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=hf_config)) == "fp8_e4m3"
    assert resolve_kv_cache_dtype_string("bfloat16", SimpleNamespace(hf_config=hf_config)) == "bfloat16"


def test_amd_says_itself_what_it_serves(monkeypatch):
    monkeypatch.setattr(settings, "current_platform", SimpleNamespace(is_rocm=lambda: True))
    check_kv_cache(configured("octave_k3v4"))


def platform(monkeypatch, cpu: bool):
    from vllm.models.qwen4_exp.compact_kv import choice

    monkeypatch.setattr(choice, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))


@pytest.mark.parametrize(
    ("cpu", "form", "asked", "expected"),
    [
        (True, "int8", None, "reference"),
        (True, "bf16", "ours", "ours"),
        (False, "bf16", None, "ours"),
        (False, "bf16", "upstream", "upstream"),
        (False, "bf16", "ours", "ours"),
        (False, "fp8", None, "ours"),
        (False, "fp8", "upstream", "upstream"),
        (False, "int8", None, "ours"),
    ],
)
def test_kernels_by_format_and_platform(monkeypatch, cpu, form, asked, expected):
    platform(monkeypatch, cpu)
    assert chosen(form, QSAConfig(kernels=asked)) == expected


@pytest.mark.parametrize(("cpu", "form"), [(True, "bf16"), (True, "fp8"), (False, "int8")])
def test_upstream_kernels_that_do_not_exist_are_refused(monkeypatch, cpu, form):
    platform(monkeypatch, cpu)
    with pytest.raises(UnknownKernels, match=f"kernels=upstream: for {form} K/V.*ours.*leave it out"):
        chosen(form, QSAConfig(kernels="upstream"))


def test_a_configuration_with_kernels_that_do_not_exist_is_refused():
    with pytest.raises(UnknownKernels, match="reference, ours"):
        check_kv_cache(configured("fp8", kernels="upstream"))


def test_a_wrong_format_is_refused_before_the_model_is_loaded():
    """The hook: what upstream calls while it builds a configuration reaches the check."""
    from tests.pipeline_parallel.test_stages import engine_config
    from vllm.model_executor.models.config import Qwen4ExpForCausalLMConfig

    config = engine_config(3)
    config.cache_config = CacheConfig(cache_dtype="nvfp4")
    with pytest.raises(KVCacheDtypeNotServed):
        Qwen4ExpForCausalLMConfig.verify_and_update_config(config)


def with_index_keys(dtype, width=128):
    config = configured("fp8")
    config.attention_config = AttentionConfig(indexer_kv_dtype=dtype)
    config.model_config.hf_text_config.indexer_head_dim = width
    return config


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_served_index_keys_pass(dtype):
    check_kv_cache(with_index_keys(dtype))


@pytest.mark.parametrize("dtype", ["mxfp4", "nvfp4", "fp8_e4m3", "int8"])
def test_other_index_keys_are_refused(dtype):
    """Upstream's layer refuses the same, in a worker."""
    with pytest.raises(
        IndexKeyDtypeNotServed, match=f"indexer_kv_dtype {dtype} is not served.*auto, bf16, fp8; use fp8"
    ):
        check_kv_cache(with_index_keys(dtype))


@pytest.mark.parametrize("width", [16, 126])
def test_index_keys_too_narrow_for_words(width):
    check_kv_cache(with_index_keys("bf16", width))
    with pytest.raises(IndexKeyTooNarrow, match=f"32 numbers or more.*indexer_head_dim={width}; use bf16"):
        check_kv_cache(with_index_keys("fp8", width))
