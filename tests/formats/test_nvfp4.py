"""NVFP4 layers on a CPU give what the same layers give with the dequantized weight, in either layout."""

import pytest
import torch

from benchmarks.format_kernels.__main__ import world
from demo.checkpoint.formats import compressed, modelopt
from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.dequantized.linear import DequantizedNvFp4LinearKernel
from vllm.model_executor.layers.quantization.dequantized.nvfp4_experts import DequantizedNvFp4Experts
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4DynamicToken
from vllm.model_executor.model_loader.accounted_load import reason
from vllm.model_executor.model_loader.canary import Hole

from .configs import modelopt_mixed, nvfp4, nvfp4_packed

EXPERTS, VISITS, TOKENS = 3, 2, 5
NAME = "model.layers.3.self_attn.o_proj"
#: One bfloat16 step of the result, and as much of what a sum of 272 products rounds away on its way.  Rounding the
#: activations to four bits, as cards with FP4 do, is 0.1 of them.
TOLERANCE = {"rtol": 2**-7, "atol": 2e-2}


def weight_only() -> ModelOptNvFp4Config:
    """A declared group without activations makes ModelOpt's NVFP4 its weight-only one."""
    groups = {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}
    return ModelOptNvFp4Config.from_config({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups})


CONFIGS = {
    "modelopt": nvfp4,
    "modelopt, weight-only": weight_only,
    "modelopt, by layer": lambda: modelopt_mixed("o_proj"),
    "compressed-tensors": lambda: nvfp4_packed(True),
    "compressed-tensors, weight-only": lambda: nvfp4_packed(False),
}


@pytest.fixture(scope="module", autouse=True)
def engine():
    with world("cpu") as vllm_config:
        yield vllm_config


@pytest.fixture(params=CONFIGS)
def config(request):
    torch.manual_seed(len(request.param))
    return CONFIGS[request.param]()


def module(config, outputs: int, inputs: int, over: torch.Tensor | None = None) -> tuple[dict, torch.Tensor]:
    """Tensors of one module in the layout of `config`, and the weight that they stand for."""
    weight = torch.randn(outputs, inputs, dtype=torch.float32) / inputs**0.5
    tensors, plain = modelopt.packed(weight, modelopt.overall([weight]) if over is None else over)
    if config.get_name() == "compressed-tensors":
        tensors = compressed.nvfp4(tensors) | {"input_global_scale": torch.ones(1)}
    return tensors, plain


def load(layer, parts: list[dict[str, torch.Tensor]]) -> None:
    """As a checkpoint's tensors get there; every parameter must come."""
    for name, parameter in layer.named_parameters():
        for shard, tensors in enumerate(parts):
            parameter.weight_loader(parameter, tensors[name], *((shard,) if len(parts) > 1 else ()))
    layer.quant_method.process_weights_after_loading(layer)


def test_scales_of_activations_may_lack_where_there_are_none(engine, config):
    weight_only = config.get_name() == "modelopt_fp4" and config.quant_method == "W4A16_NVFP4"
    weight_only = weight_only or (config.get_name() == "compressed-tensors" and not activations_of(config))
    for layer in (RowParallelLinear(64, 32, quant_config=config, prefix=NAME), routed_experts(engine, config, 64, 32)):
        model = torch.nn.ModuleDict({"part": layer})
        for name, parameter in layer.named_parameters():
            said = reason(model, f"part.{name}", parameter, Hole(1, 1, (0,)))
            assert (said is not None) == ("input" in name and weight_only), (name, said)


# 17 groups of inputs, and outputs that no packed kernel takes.
@pytest.mark.parametrize(("outputs", "inputs"), [(20, 272), (128, 256)])
def test_linear(config, outputs, inputs):
    layer = RowParallelLinear(inputs, outputs, bias=False, quant_config=config, prefix=NAME)
    assert type(getattr(layer.quant_method, "kernel", None) or layer.scheme.kernel) is DequantizedNvFp4LinearKernel
    tensors, plain = module(config, outputs, inputs)
    load(layer, [tensors])
    x = torch.randn(3, inputs)
    torch.testing.assert_close(layer(x)[0], x @ plain.t(), **TOLERANCE)
    assert torch.equal(layer.weight, plain)


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors, weight-only"])
def test_parts_of_one_product(kind):
    """They share the scale over their scales, as exporters write it."""
    config = CONFIGS[kind]()
    layer = MergedColumnParallelLinear(272, [20, 44], bias=False, quant_config=config, prefix=NAME)
    over = torch.tensor(1e-4)
    parts = [module(config, outputs, 272, over) for outputs in (20, 44)]
    load(layer, [tensors for tensors, _ in parts])
    assert torch.equal(layer.weight, torch.cat([plain for _, plain in parts]))


def test_other_devices_keep_upstreams_choice(monkeypatch):
    from vllm.model_executor.layers.quantization.dequantized import linear

    monkeypatch.setattr(linear.current_platform, "is_cpu", lambda: False)
    assert DequantizedNvFp4LinearKernel.is_supported() == (False, "would take the memory of the unquantized weight")
    with pytest.raises(ValueError, match="MarlinNvFp4LinearKernel is not supported"):
        init_nvfp4_linear_kernel(use_a16=True)


def activations_of(config) -> dict | None:
    return config.get_scheme_dict(object.__new__(RowParallelLinear), NAME)["input_activations"]


def routed_experts(engine, config, hidden: int, inner: int):
    name = "model.layers.3.mlp.experts"
    if hasattr(config, "quantized_layers"):
        config.quantized_layers |= {name: {"quant_algo": "NVFP4", "group_size": modelopt.GROUP}}
    engine.compilation_config.static_forward_context.clear()
    return FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=VISITS,
        hidden_size=hidden,
        intermediate_size=inner,
        quant_config=config,
        prefix=name,
    ).routed_experts


@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (160, 96)])
def test_experts(engine, config, hidden, inner):
    layer = routed_experts(engine, config, hidden, inner)
    assert isinstance(layer.quant_method, DequantizedNvFp4Experts)
    plain: list[dict[str, torch.Tensor]] = []
    for expert in range(EXPERTS):
        plain.append({})
        # Each has a scale of its own over its scales, gate and up too.
        for part, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors, plain[-1][part] = module(config, outputs, inputs)
            list(layer.load_weights((f"{expert}.{part}_proj.{kind}", tensor) for kind, tensor in tensors.items()))
    layer.quant_method.process_weights_after_loading(layer)
    assert {parameter for parameter, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}

    x = torch.randn(TOKENS, hidden)
    weights, ids = torch.rand(TOKENS, EXPERTS).topk(VISITS)
    want = torch.zeros(TOKENS, hidden, dtype=torch.float32)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = (plain[expert][part].float() for part in ("gate", "up", "down"))
            inside = torch.nn.functional.silu(gate @ x[token].float()) * (up @ x[token].float())
            want[token] += weight.float() * (down @ inside)
    got = layer.quant_method.apply(layer, x.clone(), weights.float(), ids.int(), None, None)
    error = (got.float() - want).norm() / want.norm()
    # Two roundings to bfloat16 on the way: 0.003; one scale for gate and up would be 0.1.
    assert error < 0.01


def test_an_override_of_the_activations_is_no_silent_one(engine):
    config = nvfp4()
    config.moe_activation_override = kNvfp4DynamicToken
    engine.compilation_config.static_forward_context.clear()
    with pytest.raises(NotImplementedError, match="stay in 16 bits: leave the override out"):
        FusedMoEFactory(
            num_experts=2,
            top_k=1,
            hidden_size=64,
            intermediate_size=32,
            quant_config=config,
            prefix="model.mlp.experts",
        )
