# SPDX-License-Identifier: Apache-2.0
"""Which projections are one matrix product, and which stay apart because a checkpoint quantizes them differently.

A fused linear layer has one quantization scheme for all its parts.  Two fusions of this
model join parts that the usual quantizers treat differently, so whether they are made
is decided here, from what the checkpoint's configuration says about each part:

* q, k, v and the indexer's projection.  gptqmodel and most mixes keep the indexer in
  bfloat16, because it picks what attention reads and is 5 % of these weights.  Fused
  where all four are treated alike (all plain included), else the indexer is a layer of
  its own and q, k, v stay one.
* the low-rank half of a hyper-connection and its block injection.  The first is read in
  full at every token and worth eight bits (0.63 GB of 5.8 a token), the second has four
  outputs, less than any packed kernel takes.  Apart as soon as either is quantized.

The model's other fusions (gate and up, the delta net's q, k, v and z, its a and b, keys
and values of the n-gram layer) join parts that quantizers treat alike; upstream raises
where a checkpoint does not.

Fusion is never lost for a plain checkpoint.  What a lost one costs is one more launch of
a small product for each layer and step; the fused silu kernel that the second loses
exists from sm_90 on only.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.linear import ReplicatedLinear

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

QKV = ("q_proj", "k_proj", "v_proj")
INDEXER = "indexer.index_qk_proj"
LOW_RANK, INJECT = "input_mix_weight_down", "block_inject_weight"


def scheme_of(quant_config: QuantizationConfig | None, name: str) -> Any:
    """How a checkpoint stores the linear module ``name``, to be compared with ``==``.

    None is unquantized, and also what every module has under a method that this function
    does not know: decisions then are upstream's.
    """
    decide = _SCHEMES.get(quant_config.get_name()) if quant_config else None
    return decide(quant_config, name) if decide else None


def plan_qkv(
    vllm_config: VllmConfig, quant_config: QuantizationConfig | None, prefix: str
) -> tuple[bool, QuantizationConfig | None]:
    """Whether the attention layer ``prefix`` fuses its indexer, and the config to build it with.

    The config is a copy that knows ``qkv_proj`` by the parts that it has here: upstream's
    list is the model's, with the indexer, and a method that finds its parts treated
    differently raises.
    """
    schemes = [scheme_of(quant_config, f"{prefix}.{part}") for part in (*QKV, INDEXER)]
    # LoRA adapters name q, k and v, so upstream keeps the indexer apart for them.
    fused = vllm_config.lora_config is None and all(one == schemes[0] for one in schemes)
    if quant_config is not None and not fused:
        quant_config = copy.copy(quant_config)
        quant_config.packed_modules_mapping = quant_config.packed_modules_mapping | {"qkv_proj": list(QKV)}
        if quant_config.get_name() == "inc":
            # Its parser looks names up in the config that it was made with.
            quant_config.config_parser = type(quant_config.config_parser)(quant_config)
    return fused, quant_config


def splits_low_rank(quant_config: QuantizationConfig | None, prefix: str) -> bool:
    """Whether the hyper-connection ``prefix`` keeps its two input projections apart."""
    return any(scheme_of(quant_config, f"{prefix}.{part}") for part in (LOW_RANK, INJECT))


def _compressed_tensors(config: Any, name: str) -> Any:
    # Targets may name a class, and all that is asked of a layer is its class's name.
    return config.get_scheme_dict(object.__new__(ReplicatedLinear), name)


def _gptq(config: Any, name: str) -> Any:
    from vllm.model_executor.layers.quantization.utils import gptq_utils

    if gptq_utils.get_dynamic_override(config, name) is False:
        return None
    if not gptq_utils.is_layer_gptq_quantized(name, config.modules_in_block_to_quantize):
        return None
    own = copy.copy(config)
    gptq_utils.override_config(own, name)
    return own.weight_bits, own.group_size, own.is_sym


def _awq(config: Any, name: str) -> Any:
    skipped = any(part in name for part in config.modules_to_not_convert)
    return None if skipped else (config.weight_bits, config.group_size)


def _auto_round(config: Any, name: str) -> Any:
    scheme = config.get_layer_config(object.__new__(ReplicatedLinear), name)
    return None if scheme[0] >= 16 else scheme


def _fp8(config: Any, name: str) -> Any:
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    skipped = is_layer_skipped(
        name, config.ignored_layers, config.packed_modules_mapping, match_mode=config.ignored_layers_match_mode
    )
    return None if skipped else config.get_name()


def _modelopt(config: Any, name: str) -> Any:
    return None if config.is_layer_excluded(name) else config.get_name()


def _modelopt_mixed(config: Any, name: str) -> Any:
    return None if config.is_layer_excluded(name) else config._resolve_quant_algo(name)


_SCHEMES = {
    "compressed-tensors": _compressed_tensors,
    "auto_gptq": _gptq,
    "auto_awq": _awq,
    "inc": _auto_round,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mxfp8": _modelopt,
    "modelopt_mixed": _modelopt_mixed,
}
