"""Packed experts on a CPU without a kernel for them, against a float32 sum over the dequantized weights."""

import pytest
import torch

from benchmarks.format_kernels.__main__ import world
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.dequantized.experts import DequantizedExperts
from vllm.utils.packed_words import pack_rows

EXPERTS, VISITS, HIDDEN, INNER, TOKENS = 4, 2, 128, 64, 5
NAME = "model.layers.0.mlp.experts"


def config(bits: int, group: int, symmetric: bool) -> CompressedTensorsConfig:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    return CompressedTensorsConfig.from_config({"format": "pack-quantized", "config_groups": groups})


@pytest.fixture(scope="module")
def engine():
    with world("cpu") as vllm_config:
        yield vllm_config


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (6, 64), (8, 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(engine, bits, group, symmetric):
    torch.manual_seed(bits)
    engine.compilation_config.static_forward_context.clear()
    layer = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=VISITS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        quant_config=config(bits, group, symmetric),
        prefix=NAME,
    ).routed_experts
    assert isinstance(layer.quant_method, DequantizedExperts)
    plain: dict[str, list[torch.Tensor]] = {"w13": [], "w2": []}
    for product, outputs, inputs in (("w13", 2 * INNER, HIDDEN), ("w2", HIDDEN, INNER)):
        for expert in range(EXPERTS):
            values = torch.randint(0, 1 << bits, (outputs, inputs))
            scale = (0.5 + torch.rand(outputs, inputs // group)) / (1 << bits) / inputs**0.5 * 4
            scale = scale.bfloat16()
            zeros = torch.full(scale.shape, 1 << (bits - 1))
            if not symmetric:
                zeros = torch.randint(1 << (bits - 2), 3 << (bits - 2), scale.shape)
                # [outputs packed, groups]
                held = getattr(layer, f"{product}_weight_zero_point")
                held.data[expert] = pack_rows(zeros.t(), bits).t()
            getattr(layer, f"{product}_weight_packed").data[expert] = pack_rows(values, bits)
            getattr(layer, f"{product}_weight_scale").data[expert] = scale
            spread = [t.repeat_interleave(group, dim=1) for t in (zeros, scale.float())]
            plain[product].append((values - spread[0]) * spread[1])
    layer.quant_method.process_weights_after_loading(layer)

    x = torch.randn(TOKENS, HIDDEN)
    weights, ids = torch.rand(TOKENS, EXPERTS).topk(VISITS)
    want = torch.zeros(TOKENS, HIDDEN, dtype=torch.float32)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (plain["w13"][expert] @ x[token].float()).chunk(2)
            want[token] += weight.float() * (plain["w2"][expert] @ (torch.nn.functional.silu(gate) * up))
    got = layer.quant_method.apply(layer, x.clone(), weights.float(), ids.int(), None, None)
    error = (got.float() - want).norm() / want.norm()
    # Two roundings to bfloat16 on the way and one of the weight: 0.003; a wrong zero point is above 0.1.
    assert error < 0.01
