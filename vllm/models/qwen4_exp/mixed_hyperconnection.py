# SPDX-License-Identifier: Apache-2.0
"""A hyper-connection whose low-rank matrices may be quantized.

Upstream builds all three projections in bfloat16, two of them as one layer.  Where the
checkpoint packs a low-rank matrix, this class builds the parts as layers of their own,
each with the scheme that the checkpoint's configuration names for it.  Kernels and order
of operations stay upstream's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix

from .kernels import hc_silu
from .nvidia.hyperconnection import GatedResidual, HyperConnectionConfig
from .quantization import INJECT, LOW_RANK, scheme_of, splits_low_rank

UP = "input_mix_weight_up"
MERGED = f"{LOW_RANK}_block_inject"


class MixedGatedResidual(GatedResidual):
    """Upstream's, where nothing is quantized; else with separate projections.

    Raises, through the linear layers, where a scheme does not fit: ``input_mix_weight_up``
    has 320 inputs in the published model, which groups of 128 do not divide.
    """

    def __init__(self, config: HyperConnectionConfig, use_combine: bool = True, prefix: str = "") -> None:
        super().__init__(config, use_combine, prefix)
        quant_config = get_current_vllm_config().quant_config
        self._split = use_combine and splits_low_rank(quant_config, prefix)

        def projection(name: str, inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(
                inputs,
                outputs,
                bias=False,
                params_dtype=config.params_dtype,
                quant_config=quant_config,
                prefix=maybe_prefix(prefix, name),
                return_bias=False,
            )

        if self._split:
            del self.input_mix_weight_down_block_inject
            # Rows that fill the merged layer up to 16; there is none.
            self.pad_size = 0
            self.block_inject_weight = projection(INJECT, self.hyper_hidden_size, self.hc_count)
            self.load_weights = self._load_split
        if self._split or scheme_of(quant_config, maybe_prefix(prefix, LOW_RANK)):
            self.input_mix_weight_down = projection(LOW_RANK, self.hyper_hidden_size, self.hc_lowrank)
        if scheme_of(quant_config, maybe_prefix(prefix, UP)):
            self.input_mix_weight_up = projection(UP, self.hc_lowrank, self.hyper_hidden_size)

    def _down_and_inject(self, xn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._split:
            return super()._down_and_inject(xn)
        lowrank = self.input_mix_weight_down(xn)
        return hc_silu(lowrank, self.hc_count), self.block_inject_weight(xn)

    def _load_split(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(_unmerged(weights))


def _unmerged(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Undo upstream's name mapping, which knows the merged layer only.

    It maps by the beginning of a tensor's name, so packed tensors and their scales come
    under the merged layer's name too, with the number of the part.
    """
    for name, weight in weights:
        if name.startswith(f"{MERGED}."):
            part = (LOW_RANK, INJECT)[weight.shard_id]
            name = f"{part}.{name.removeprefix(f'{MERGED}.')}"
            # A view without the number: the separate layers have no parts.
            weight = weight.detach()
        yield name, weight
