# SPDX-License-Identifier: Apache-2.0
"""Routed experts that multiply with dequantized weights, for the CPU.

Upstream's CPU kernel for packed experts needs AMX tiles and four bits.  Elsewhere the
packed parameters of a checkpoint are loaded by upstream's own code, turned into plain
weights, and run by the CPU's kernel for those.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from .reference import dequantize, unpack

logger = init_logger(__name__)


class DequantizedExperts(UnquantizedFusedMoEMethod):
    """Packed while loading, plain afterwards; a subclass knows one layout."""

    def maybe_roundup_sizes(self, *sizes: Any, **named: Any) -> tuple[int, int]:
        # The packed sizes are the checkpoint's; the plain kernel pads for itself.
        return FusedMoEMethodBase.maybe_roundup_sizes(self, *sizes, **named)

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **named: Any) -> None:
        raise NotImplementedError("a subclass creates the parameters of its layout")

    def plain_weights(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """What the parameters stand for: ``[experts, 2 * inner, hidden]`` and ``[experts, hidden, inner]``."""
        raise NotImplementedError("a subclass reads its layout")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed = [name for name, _ in layer.named_parameters(recurse=False)]
        plain = self.plain_weights(layer)
        for name in packed:
            delattr(layer, name)
        for product, weight in zip(("w13", "w2"), plain, strict=True):
            layer.register_parameter(f"{product}_weight", torch.nn.Parameter(weight, requires_grad=False))
        super().process_weights_after_loading(layer)


class DequantizedIntegerExperts(DequantizedExperts):
    """Integers in 32-bit words.

    Args:
        moe: the layer's configuration.
        bits: width of an integer.
        names: parameters with the packed weight, its scale and, of asymmetric ones, the
            zero point, without ``w13_`` or ``w2_`` in front.
        inputs_first: the layout is gptqmodel's, transposed.

    """

    def __init__(self, moe: FusedMoEConfig, bits: int, names: tuple[str, ...], inputs_first: bool) -> None:
        super().__init__(moe)
        self.bits = bits
        self.names = names
        self.inputs_first = inputs_first

    def plain_weights(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self._plain_weight(layer, "w13", self.moe.hidden_dim),
            self._plain_weight(layer, "w2", self.moe.intermediate_size_per_partition),
        )

    def _plain_weight(self, layer: torch.nn.Module, product: str, inputs: int) -> torch.Tensor:
        held = [getattr(layer, f"{product}_{name}").data for name in self.names]
        if self.inputs_first:
            held = [tensor.transpose(1, 2) for tensor in held]
        weight, scale, *zeros = held
        zero_point = None
        if zeros:
            # Packed along the outputs: bring those last, then back.
            zero_point = unpack(zeros[0].transpose(1, 2), self.bits, scale.shape[1])
            zero_point = zero_point.transpose(1, 2)
        return dequantize(weight, scale, self.bits, inputs, self.moe.in_dtype, zero_point)


def compressed_tensors_experts(
    method: type[FusedMoEMethodBase],
    weight_quant: QuantizationArgs,
    input_quant: QuantizationArgs | None,
    moe: FusedMoEConfig,
) -> FusedMoEMethodBase:
    """Upstream's ``method`` for pack-quantized experts, or ours where no kernel fits."""

    class Dequantized(DequantizedIntegerExperts):
        # What upstream's parameters are made from.
        symmetric = weight_quant.symmetric
        num_bits = weight_quant.num_bits
        packed_factor = Fraction(32, weight_quant.num_bits)
        strategy = weight_quant.strategy
        group_size = weight_quant.group_size or -1
        get_weight_shape = method.get_weight_shape
        create_weights = method.create_weights

    names = ["weight_packed", "weight_scale"]
    if not weight_quant.symmetric:
        names.append("weight_zero_point")
    return first_that_runs(
        lambda: method(weight_quant, input_quant, moe),
        lambda: Dequantized(moe, weight_quant.num_bits, tuple(names), inputs_first=False),
    )


def gptq_experts(quant_config: Any, moe: FusedMoEConfig) -> FusedMoEMethodBase:
    """Upstream's method for gptqmodel's experts, or ours where no kernel fits."""
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

    class Dequantized(DequantizedIntegerExperts):
        input_dtype = None
        create_weights = AutoGPTQMoEMethod.create_weights

    def dequantized() -> FusedMoEMethodBase:
        names = ("qweight", "scales")
        made = Dequantized(moe, quant_config.weight_bits, names, inputs_first=True)
        made.quant_config = quant_config
        return made

    return first_that_runs(lambda: AutoGPTQMoEMethod(quant_config, moe), dequantized)


def first_that_runs(
    kernel: Callable[[], FusedMoEMethodBase], dequantized: Callable[[], FusedMoEMethodBase]
) -> FusedMoEMethodBase:
    """What ``kernel`` makes, or on a CPU for which it finds no backend what ``dequantized`` makes."""
    try:
        return kernel()
    except NotImplementedError:
        if not current_platform.is_cpu():
            raise
    logger.info_once("No CPU kernel for these experts: dequantized while loading.")
    return dequantized()
