"""Which projections are fused, decided from real quantization configs."""

from types import SimpleNamespace

import pytest
import torch

from demo.checkpoint.formats import compressed
from demo.checkpoint.formats.recipes import INT6_G64, INT8_G128, Recipe, Rule
from demo.checkpoint.formats.rounding import round_weight
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear

# model before qsa: the two import each other.
from vllm.models.qwen4_exp.nvidia import model, qsa
from vllm.models.qwen4_exp.quantization import INDEXER, QKV, plan_qkv, scheme_of, splits_low_rank

from .configs import (
    ALL_FOUR,
    ATTENTION,
    HYPER,
    auto_round,
    compressed_tensors,
    fp8,
    gptqmodel,
    modelopt_mixed,
    nvfp4,
)

INDEXER_APART = Recipe("compressed-tensors", (Rule(r"index_qk_proj", INT8_G128), Rule(r"self_attn\..*_proj", INT6_G64)))
NO_LORA, LORA = SimpleNamespace(lora_config=None), SimpleNamespace(lora_config=object())
FULL = model.Qwen4ExpForCausalLM.packed_modules_mapping["qkv_proj"]


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (lambda: None, True),
        (lambda: compressed_tensors(), False),
        (lambda: compressed_tensors(ALL_FOUR), True),
        (lambda: compressed_tensors(ALL_FOUR, (f"{ATTENTION}.{INDEXER}",)), False),
        (lambda: compressed_tensors(INDEXER_APART), False),
        (lambda: compressed_tensors(Recipe("compressed-tensors", (Rule(r"mlp\..*", INT8_G128),))), True),
        (lambda: gptqmodel(), False),
        (lambda: gptqmodel(modules=tuple(f"{ATTENTION}.{part}" for part in FULL)), True),
        (lambda: gptqmodel(modules=("model.layers.3.linear_attn.out_proj",)), True),
    ],
    ids=[
        "unquantized",
        "mix, indexer plain",
        "all four INT8",
        "all four INT8 but for one layer",
        "indexer another width",
        "attention plain",
        "gptqmodel, indexer plain",
        "gptqmodel, all four",
        "gptqmodel, attention plain",
    ],
)
def test_indexer(config, fused):
    config = config()
    got, own = plan_qkv(NO_LORA, config, ATTENTION)
    assert got is fused
    if config is not None:
        assert own.packed_modules_mapping["qkv_proj"] == (FULL if fused else list(QKV))
        # Other layers, and LoRA, still see upstream's list.
        assert config.packed_modules_mapping["qkv_proj"] == FULL
        # The first question that building a layer asks; upstream's own answer is an error.
        own.get_quant_method(object.__new__(ReplicatedLinear), f"{ATTENTION}.qkv_proj")


@pytest.mark.parametrize(
    ("made", "fused"),
    [
        (lambda: auto_round(), True),
        (lambda: auto_round({f"{ATTENTION}.{INDEXER}": {"bits": 16}}), False),
        (lambda: fp8(), True),
        (lambda: fp8(f"{ATTENTION}.{INDEXER}"), False),
        (lambda: nvfp4(), True),
        (lambda: nvfp4(f"{ATTENTION}.{INDEXER}"), False),
        (lambda: nvfp4("*indexer*"), False),
        (lambda: nvfp4(ATTENTION), True),
        (lambda: modelopt_mixed(*QKV, INDEXER), True),
        (lambda: modelopt_mixed(*QKV), False),
    ],
    ids=[
        "AutoRound", "AutoRound, indexer plain", "FP8", "FP8, indexer plain", "NVFP4", "NVFP4, indexer plain",
        "NVFP4, indexer plain by a pattern", "NVFP4, attention plain", "ModelOpt, listed", "ModelOpt, indexer not listed",
    ],
)  # fmt: skip
def test_indexer_under_methods_that_name_what_they_leave(made, fused):
    config = made()
    got, own = plan_qkv(NO_LORA, config, ATTENTION)
    assert got is fused
    # q, k and v are found by the parts that the layer has, whichever way a method looks them up.
    qkv, parts = (scheme_of(own, f"{ATTENTION}.{part}") for part in ("qkv_proj", "q_proj"))
    assert qkv == parts
    if not fused:
        assert scheme_of(own, f"{ATTENTION}.{INDEXER}") is None and parts is not None


def test_lora_keeps_the_indexer_apart():
    assert plan_qkv(LORA, None, ATTENTION) == (False, None)
    fused, own = plan_qkv(LORA, compressed_tensors(ALL_FOUR), ATTENTION)
    assert not fused and own.packed_modules_mapping["qkv_proj"] == list(QKV)


def test_upstream_alone_refuses(bf16):
    """What makes the topic necessary; once this fails, the topic can go."""
    name = f"{ATTENTION}.qkv_proj"
    with pytest.raises(ValueError, match="some but not all shards"):
        gptqmodel().get_quant_method(object.__new__(ReplicatedLinear), name)
    with pytest.raises(ValueError, match="different quantization schemes"):
        made = compressed_tensors(ALL_FOUR, (f"{ATTENTION}.{INDEXER}",))
        made.get_quant_method(object.__new__(ReplicatedLinear), name)


def test_low_rank():
    assert splits_low_rank(compressed_tensors(), HYPER)
    assert not splits_low_rank(compressed_tensors(ALL_FOUR), HYPER)
    assert not splits_low_rank(gptqmodel(), HYPER)
    assert not splits_low_rank(None, HYPER)


def test_schemes_of_gptq():
    names = (f"{ATTENTION}.q_proj", "model.layers.0.mlp.experts.0.up_proj")
    config = gptqmodel(modules=names)
    assert [scheme_of(config, name) for name in names] == [(4, 32, True), (4, 128, True)]
    assert scheme_of(config, f"{ATTENTION}.{INDEXER}") is None
    config.dynamic = {r"-:.*q_proj": {}}
    assert scheme_of(config, names[0]) is None


def test_unknown_methods_decide_nothing():
    config = SimpleNamespace(get_name=lambda: "quark")
    assert scheme_of(config, f"{ATTENTION}.q_proj") is None
    assert plan_qkv(NO_LORA, config, ATTENTION) == (True, config)


def test_fused_equals_unfused(world, bf16):
    """Four packed projections as one layer and as four, with the same tensors."""
    hidden, head, heads, kv_heads, index = 256, 64, 4, 2, 128
    config = compressed_tensors(ALL_FOUR)
    qkv = QKVParallelLinear(
        hidden, head, heads, kv_heads, bias=False, quant_config=config, prefix=f"{ATTENTION}.qkv_proj"
    )
    fused = qsa.Qwen4ExpQSAQKVIndexerLinear(qkv, index, config)
    sizes = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head, INDEXER: index}
    parts = []
    for number, (name, size) in enumerate(sizes.items()):
        part = ReplicatedLinear(hidden, size, bias=False, quant_config=config, prefix=f"{ATTENTION}.{name}")
        held = compressed.tensors(round_weight(torch.randn(size, hidden), INT8_G128, torch.bfloat16))
        for kind, tensor in held.items():
            part_parameter, fused_parameter = getattr(part, kind), getattr(fused, kind)
            part_parameter.weight_loader(part_parameter, tensor)
            fused_parameter.weight_loader(fused_parameter, tensor, number)
        part.quant_method.process_weights_after_loading(part)
        parts.append(part)
    fused.quant_method.process_weights_after_loading(fused)
    x = torch.randn(5, hidden)
    got, _ = fused(x)
    want = torch.cat([part(x)[0] for part in parts], dim=-1)
    # The matrix product may sum in another order for another width: one bfloat16 step.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)
