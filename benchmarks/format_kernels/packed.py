"""Random weights in an on-disk layout, with what they stand for."""

from __future__ import annotations

import torch

from benchmarks.format_kernels.cases import GPTQ, MODELOPT, Case
from demo.checkpoint.formats import compressed, gptq, modelopt
from demo.checkpoint.formats.recipes import Recipe, Rule
from demo.checkpoint.formats.rounding import Scheme, round_weight

#: Outputs that are packed at once: packing goes through 64-bit integers, 20 GB for all of the lm_head.
ROWS = 8192


def packed(
    outputs: int, inputs: int, scheme: Scheme, layout: str, device: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of one module as on disk, and the bfloat16 weight [outputs, inputs] that they stand for."""
    if layout == MODELOPT:
        weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
        return modelopt.packed(weight, modelopt.overall([weight]))
    writer = gptq if layout == GPTQ else compressed
    parts, plain = [], []
    for start in range(0, outputs, ROWS):
        rows = min(ROWS, outputs - start)
        weight = torch.randn(rows, inputs, device=device, dtype=torch.float32) / inputs**0.5
        rounded = round_weight(weight, scheme, writer.SCALE_DTYPE)
        parts.append(writer.tensors(rounded))
        plain.append(rounded.dequantized())
    joined = {name: _join(name, [part[name] for part in parts], layout) for name in parts[0]}
    if "weight_shape" in joined:
        joined["weight_shape"] = torch.tensor([outputs, inputs])
    return joined, torch.cat(plain)


def _join(name: str, parts: list[torch.Tensor], layout: str) -> torch.Tensor:
    if name == "g_idx" or len(parts) == 1:
        return parts[0]
    # gptqmodel keeps the outputs last.
    return torch.cat(parts, dim=1 if layout == GPTQ else 0)


def quant_config(case: Case, name: str):
    """vLLM's config object of a checkpoint in which the module `name` has the case's scheme."""
    if case.layout == MODELOPT:
        from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

        return ModelOptNvFp4Config.from_config({"quantization": modelopt.config([])})
    recipe = Recipe(case.layout, (Rule(r".*", case.scheme),))
    if case.layout == GPTQ:
        from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

        made = AutoGPTQConfig.from_config(gptq.config(recipe))
        made.modules_in_block_to_quantize = [name]
        return made
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    return CompressedTensorsConfig.from_config(compressed.config(recipe, []))
