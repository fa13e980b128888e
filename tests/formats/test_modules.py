"""Packed modules give what the same modules give with the dequantized weight."""

import pytest
import torch
from torch import nn

from demo.checkpoint.formats import compressed, gptq
from demo.checkpoint.formats.recipes import INT8_G32, INT8_G128, Recipe, Rule
from demo.checkpoint.formats.rounding import Scheme, round_weight
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.dequantized.linear import DequantizedLinearKernel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.models.qwen4_exp.mixed_hyperconnection import MixedGatedResidual
from vllm.models.qwen4_exp.nvidia.hyperconnection import HyperConnectionConfig
from vllm.models.qwen4_exp.nvidia.model import _EXTRA_WEIGHTS_MAPPER

from .configs import ALL_FOUR, HYPER, compressed_tensors, gptqmodel

pytestmark = pytest.mark.usefixtures("world", "bf16")

#: one bfloat16 step of the result, and as much of what a sum of 256 or 1024 products rounds away on its way
TOLERANCE = {"rtol": 2**-7, "atol": 2e-2}
HIDDEN, HC, RANK = 256, 4, 96


def load(layer, tensors: dict[str, torch.Tensor]) -> None:
    """As a checkpoint's tensors get there; every parameter must come, since uninitialised memory is often zero."""
    assert {name for name, _ in layer.named_parameters()} <= set(tensors)
    for name, parameter in layer.named_parameters():
        parameter.weight_loader(parameter, tensors[name])
    layer.quant_method.process_weights_after_loading(layer)


def matrix(outputs: int, inputs: int, scheme: Scheme, dtype=torch.bfloat16):
    return round_weight(torch.randn(outputs, inputs) / inputs**0.5, scheme, dtype)


@pytest.mark.parametrize(
    ("module", "scheme", "kernel"),
    [
        ("self_attn.o_proj", Scheme(6, 64), DequantizedLinearKernel),
        ("linear_attn.out_proj", INT8_G128, DequantizedLinearKernel),
        ("mlp.experts.0.down_proj", Scheme(4, 128), CPUWNA16LinearKernel),
    ],
)
def test_compressed_tensors_linear(module, scheme, kernel):
    config = compressed_tensors()
    layer = ReplicatedLinear(HIDDEN, 64, bias=False, quant_config=config, prefix=f"model.layers.0.{module}")
    assert type(layer.scheme.kernel) is kernel
    rounded = matrix(64, HIDDEN, scheme)
    load(layer, compressed.tensors(rounded))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(layer(x)[0], x @ rounded.dequantized().t(), **TOLERANCE)


@pytest.mark.parametrize("group", [32, 128])
def test_gptq_linear(group):
    name = "model.layers.0.mlp.experts.0.up_proj" if group == 128 else "model.layers.0.linear_attn.out_proj"
    layer = ReplicatedLinear(HIDDEN, 64, bias=False, quant_config=gptqmodel(modules=(name,)), prefix=name)
    rounded = matrix(64, HIDDEN, Scheme(4, group), torch.float16)
    load(layer, gptq.tensors(rounded))
    x = torch.randn(3, HIDDEN)
    # vLLM keeps scales in the model's dtype: half a bfloat16 step of every weight.
    torch.testing.assert_close(layer(x)[0], x @ rounded.dequantized().t(), rtol=2**-6, atol=4e-2)


@pytest.mark.parametrize("kernel_bits", range(2, 9))
def test_any_width_on_the_cpu(kernel_bits):
    scheme = Scheme(kernel_bits, 64)
    config = compressed_tensors(Recipe("compressed-tensors", (Rule(r"o_proj", scheme),)))
    # 20 outputs: no packed kernel takes them.
    layer = ReplicatedLinear(HIDDEN, 20, bias=False, quant_config=config, prefix="model.layers.0.self_attn.o_proj")
    rounded = matrix(20, HIDDEN, scheme)
    load(layer, compressed.tensors(rounded))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(layer(x)[0], x @ rounded.dequantized().t(), **TOLERANCE)


def test_embedding():
    layer = VocabParallelEmbedding(500, HIDDEN, quant_config=compressed_tensors(), prefix="model.embed_tokens")
    rounded = matrix(500, HIDDEN, INT8_G128)
    load(layer, compressed.tensors(rounded))
    ids = torch.tensor([0, 499, 7, 7])
    assert torch.equal(layer(ids), rounded.dequantized()[ids])


def test_head():
    layer = ParallelLMHead(500, HIDDEN, quant_config=compressed_tensors(), prefix="lm_head")
    rounded = matrix(500, HIDDEN, INT8_G128)
    load(layer, compressed.tensors(rounded))
    x = torch.randn(3, HIDDEN)
    got = layer.quant_method.apply(layer, x)
    torch.testing.assert_close(got[:, :500], x @ rounded.dequantized().t(), **TOLERANCE)
    assert not got[:, 500:].any(), "padded rows are not zero"


def hyper_connection(quant_config, use_combine: bool = True) -> MixedGatedResidual:
    get_current_vllm_config().quant_config = quant_config
    config = HyperConnectionConfig(hc_count=HC, hidden_size=HIDDEN, hc_lowrank=RANK, hc_per_branch_norm=True)
    return MixedGatedResidual(
        config, use_combine=use_combine, prefix=HYPER if use_combine else "model.hyper_connection_mixer"
    )


@pytest.fixture
def low_rank():
    """Rounded down and up, the plain injection and the norm."""
    down, up = matrix(RANK, HC * HIDDEN, INT8_G128), matrix(HC * HIDDEN, RANK, INT8_G32)
    return down, up, torch.randn(HC, HC * HIDDEN), torch.rand(HC * HIDDEN)


def load_hyper(module: MixedGatedResidual, prefix: str, weights: dict[str, torch.Tensor]) -> set[str]:
    """Through upstream's name mapping and the model's own loader."""
    holder = nn.Module()
    holder.add_module(prefix, module)
    named = ((f"{prefix}.{name}", weight) for name, weight in weights.items())
    loaded = AutoWeightsLoader(holder).load_weights(named, mapper=_EXTRA_WEIGHTS_MAPPER)
    for layer in module.modules():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
    return loaded


def tensors_of(low_rank, packed: bool, use_combine: bool) -> dict[str, torch.Tensor]:
    down, up, inject, norm = low_rank
    held = {"hc_norm.weight": norm} | ({"block_inject_weight.weight": inject} if use_combine else {})
    for name, rounded in (("input_mix_weight_down", down), ("input_mix_weight_up", up)):
        parts = compressed.tensors(rounded) if packed else {"weight": rounded.dequantized()}
        held |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return held


@pytest.mark.parametrize("use_combine", [True, False], ids=["around a block", "final mixer"])
def test_hyper_connection(low_rank, use_combine):
    name = "attn_hyper_connection" if use_combine else "hyper_connection_mixer"
    packed, plain = hyper_connection(compressed_tensors(), use_combine), hyper_connection(None, use_combine)
    parameters = {parameter for parameter, _ in packed.named_parameters()}
    loaded = load_hyper(packed, name, tensors_of(low_rank, True, use_combine))
    load_hyper(plain, name, tensors_of(low_rank, False, use_combine))
    assert loaded == {f"{name}.{parameter}" for parameter in parameters}
    state = torch.randn(6, HC * HIDDEN)
    for got, want in zip(packed.mix(state), plain.mix(state), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, **TOLERANCE)
    block = torch.randn(6, HIDDEN)
    injection = packed.mix(state)[2]
    for got, want in zip(
        packed.combine_and_mix(state, block, injection), plain.combine_and_mix(state, block, injection), strict=True
    ):
        if want is not None:
            torch.testing.assert_close(got, want, **TOLERANCE)


def test_plain_hyper_connection_stays_merged():
    for config in (None, gptqmodel(), compressed_tensors(ALL_FOUR)):
        module = hyper_connection(config)
        assert {name for name, _ in module.named_parameters()} == {
            "hc_norm.weight",
            "input_mix_weight_down_block_inject.weight",
            "input_mix_weight_up.weight",
        }


def test_groups_that_do_not_divide_the_rank():
    recipe = Recipe("compressed-tensors", (Rule(r"input_mix_weight_up", INT8_G128),))
    with pytest.raises(ValueError, match="128"):
        hyper_connection(compressed_tensors(recipe))
