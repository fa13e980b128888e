# SPDX-License-Identifier: Apache-2.0
"""Look up rows with scales of their own in pinned host memory, from the GPU."""

import torch

from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import _e4m3_inline
from vllm.triton_utils import tl, triton


def lookup_row_scaled_reference(
    weight: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor, output: torch.Tensor, start: int, end: int
) -> None:
    """The same in torch, of the same signature."""
    flat = output.view(-1, weight.shape[1])
    own = (ids >= start) & (ids < end)
    local = torch.where(own, ids - start, 0)
    bytes_ = weight.view(torch.uint8)[local].view(weight.dtype)
    rows = bytes_.float() * scale[local].float()
    flat.copy_(torch.where(own[:, None], rows, 0))


def lookup_row_scaled(
    weight: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor, output: torch.Tensor, start: int, end: int
) -> None:
    """Fill ``output`` with dequantized rows; rows that another rank owns become zero.

    Args:
        weight: ``[own rows, dim]``, float8_e4m3fn or int8, seen from the device
        scale: ``[own rows, 1]``, float32, bfloat16 or float16, likewise
        ids: int64 ``[n]``, row numbers of the whole table
        output: contiguous, ``n * dim`` values of the activations' dtype
        start, end: the rows of the whole table that are own
    """
    dim = weight.shape[1]
    _lookup_row_scaled_kernel[(ids.numel(),)](
        weight.view(torch.int8 if weight.dtype is torch.int8 else torch.uint8),
        scale,
        ids,
        output,
        dim,
        start,
        end,
        FP8=weight.dtype is not torch.int8,
        BLOCK=triton.next_power_of_2(dim),
    )


@triton.jit
def _lookup_row_scaled_kernel(weight, scale, ids, output, dim, start, end, FP8: tl.constexpr, BLOCK: tl.constexpr):
    # One program, one row. fp8 is decoded from bytes: sm_86 has no fp8 loads.
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + at)
    own = (row >= start) & (row < end)
    local = tl.where(own, row - start, 0)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    codes = tl.load(weight + local * dim + columns, mask=inside & own, other=0)
    values = _e4m3_inline(codes) if FP8 else codes.to(tl.float32)
    values = values * tl.load(scale + local, mask=own, other=0).to(tl.float32)
    tl.store(output + at * dim + columns, values, mask=inside)
