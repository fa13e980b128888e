# SPDX-License-Identifier: Apache-2.0
"""Linear layers that multiply with the dequantized weight, for the CPU."""

import torch

from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.platforms import current_platform

from .reference import dequantize, unpack


class DequantizedLinearKernel(MPLinearKernel):
    """Dequantizes at load time, then is a plain matrix product.

    Takes any width from 1 to 8 bits, any group size and any shape.  The weight takes the
    activations' dtype, so memory is what the unquantized model takes: for trying and
    testing, which is what the CPU is for here.
    """

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "would take the memory of the unquantized weight"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        inputs, outputs = self.config.partition_weight_shape
        bits = self.config.weight_type.size_bits
        packed = getattr(layer, self.w_q_name)
        scale = getattr(layer, self.w_s_name)
        zero_point = None
        if self.config.zero_points:
            assert self.w_zp_name is not None
            zeros = getattr(layer, self.w_zp_name)
            # Packed along the outputs: bring those last, then back.
            words = zeros.t() if zeros.output_dim == 0 else zeros
            zero_point = unpack(words.data, bits, outputs).t()
        weight = dequantize(
            packed.data if packed.output_dim == 0 else packed.data.t(),
            scale.data if scale.output_dim == 0 else scale.data.t(),
            bits,
            inputs,
            self.config.act_type,
            zero_point,
        )
        replace_parameter(layer, self.w_q_name, weight)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, getattr(layer, self.w_q_name), bias)

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # no GPU


class DequantizedNvFp4LinearKernel(NvFp4LinearKernel):
    """The same for NVFP4, of ModelOpt and of compressed-tensors.

    Upstream's emulation rounds activations to four bits too, which no weight-only kernel
    does and no reference without quantization can be compared with.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "would take the memory of the unquantized weight"
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = dequantize_to_dtype(
            layer.weight.data, layer.weight_scale.data, layer.weight_global_scale, layer.params_dtype, swizzle=False
        )
        replace_parameter(layer, "weight", weight)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)
