# SPDX-License-Identifier: Apache-2.0
"""Routed experts in NVFP4 that multiply with dequantized weights, for the CPU.

Upstream's emulation rounds activations to four bits as well, as cards with FP4 do, in a
Triton kernel.  Here they stay in 16 bits, as on cards without FP4.  Parameters, how they
are loaded and what they stand for are upstream's, in ModelOpt's layout and in that of
compressed-tensors.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase

from .experts import DequantizedExperts, first_that_runs


class DequantizedNvFp4Experts(DequantizedExperts):
    """Packed while loading, plain afterwards; a subclass has upstream's functions of its layout.

    Args:
        moe: the layer's configuration.
        use_a16: the checkpoint has no scales of activations.

    """

    #: of upstream's methods: each rank has scales of its own experts
    use_global_sf = False

    #: upstream's (method, layer) -> weights of all experts in the layer, both products
    dequantize_weight: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, moe: FusedMoEConfig, use_a16: bool) -> None:
        super().__init__(moe)
        self.use_a16 = use_a16

    def plain_weights(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        held = dict(layer.named_parameters(recurse=False))
        # One at a time: on the way every four-bit number is one of 64 bits.
        one_by_one = [
            self.dequantize_weight(
                SimpleNamespace(
                    params_dtype=self.moe.in_dtype,
                    **{name: parameter.data[expert : expert + 1] for name, parameter in held.items()},
                )
            )
            for expert in range(layer.num_experts)
        ]
        w13, w2 = zip(*one_by_one, strict=True)
        return torch.cat(w13), torch.cat(w2)


def modelopt_nvfp4_experts(quant_config: Any, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
    """Upstream's method for ModelOpt's experts, or ours where no kernel fits."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

    # The name is what the loader knows ModelOpt's scales by.
    class DequantizedModelOpt(DequantizedNvFp4Experts):
        create_weights = ModelOptNvFp4FusedMoE.create_weights
        dequantize_weight = ModelOptNvFp4FusedMoE.dequantize_weight
        uses_weight_scale_2_pattern = ModelOptNvFp4FusedMoE.uses_weight_scale_2_pattern

    def dequantized() -> FusedMoEMethodBase:
        if quant_config.moe_activation_override is not None:
            raise NotImplementedError(
                "On the CPU activations of NVFP4 experts stay in 16 bits: leave the override out."
            )
        made = DequantizedModelOpt(moe_config, use_a16=quant_config.quant_method == "W4A16_NVFP4")
        made.quant_config = quant_config
        return made

    return first_that_runs(lambda: ModelOptNvFp4FusedMoE(quant_config, moe_config), dequantized)


def compressed_tensors_nvfp4_experts(
    method: type[FusedMoEMethodBase], moe: FusedMoEConfig, layer_name: str | None, use_a16: bool
) -> FusedMoEMethodBase:
    """Upstream's ``method`` for experts packed by compressed-tensors, or ours where no kernel fits."""

    class Dequantized(DequantizedNvFp4Experts):
        group_size = 16
        create_weights = method.create_weights
        dequantize_weight = method.dequantize_weight

    return first_that_runs(lambda: method(moe, layer_name, use_a16=use_a16), lambda: Dequantized(moe, use_a16))
