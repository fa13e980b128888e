# SPDX-License-Identifier: Apache-2.0
"""Rows of a packed embedding, for the CPU."""

from collections.abc import Callable

import torch

from vllm.platforms import current_platform

from .reference import dequantize


def dequantized_rows(
    ids: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, hidden: int, bits: int
) -> torch.Tensor:
    """The rows ``ids`` of a packed table, ``[ids, hidden]`` in the scales' dtype.

    Takes what upstream's Triton function takes.  Only the rows asked for are unpacked.
    """
    return dequantize(packed[ids], scale[ids], bits, hidden, scale.dtype)


def row_gather(triton_gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Upstream's function, or ours where Triton would be interpreted."""
    return dequantized_rows if current_platform.is_cpu() else triton_gather
