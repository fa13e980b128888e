# SPDX-License-Identifier: Apache-2.0
"""A row as its cache keeps it, in its slot: what both kernels end in.

What is stored never hides damage: a row with a NaN or an infinity gets a NaN scale
(int8) or NaN codes (fp8), so that the request which reads it notices.  Finite numbers
beyond e4m3's range saturate at 448 times the scale.

Pointers are bytes or bf16 on every card: e4m3 is encoded in arithmetic, because
Triton has no fp8 pointer below sm_89.
"""

import torch

from vllm.triton_utils import tl, triton

from ..e4m3 import encode
from ..formats import BF16, FP8, INT8

# int8 rows whose largest number is below this are stored as zeros: its reciprocal
# would leave fp32.
_SMALLEST = tl.constexpr(1e-30)
_INT8_MAX = tl.constexpr(127.0)
# Adding and subtracting 1.5 * 2**23 rounds an fp32 below 2**22 to the nearest even.
_ROUND = tl.constexpr(12582912.0)
_INF = tl.constexpr(float("inf"))

_BF16, _FP8, _INT8 = 0, 1, 2
KINDS = {BF16.dtype: _BF16, FP8.dtype: _FP8, INT8.dtype: _INT8}


@triton.jit
def _store_row(x, row_ptr, scale_ptr, tensor_scale, dims, mask, KIND: tl.constexpr):
    """Store fp32 ``x`` (zeros where ``mask`` is off) as the cache keeps it.

    KIND 0: bf16.  KIND 1: e4m3 bytes of ``x / tensor_scale``.  KIND 2: int8 with the
    row's scale at ``scale_ptr``.
    """
    if KIND == 0:
        tl.store(row_ptr + dims, x.to(tl.bfloat16), mask=mask)
    elif KIND == 1:
        # div_rn, here and below: a plain division is approximate on a GPU.
        scaled = tl.div_rn(x, tensor_scale + tl.zeros_like(x))
        scaled = tl.where(tl.abs(x) < _INF, scaled, float("nan"))
        tl.store(row_ptr + dims, encode(scaled), mask=mask)
    else:
        finite = tl.abs(x) < _INF
        sound = tl.min(finite.to(tl.int32), axis=0) == 1
        x = tl.where(finite, x, 0.0)
        most = tl.max(tl.abs(x), axis=0)
        normal = most >= _SMALLEST
        divisor = tl.where(normal, most, 1.0)
        factor = tl.where(normal & sound, tl.div_rn(_INT8_MAX + 0.0 * most, divisor), 0.0)
        scale = tl.where(normal, tl.div_rn(most, _INT8_MAX + 0.0 * most), 0.0)
        codes = (x * factor + _ROUND) - _ROUND
        tl.store(row_ptr + dims, codes.to(tl.int8), mask=mask)
        tl.store(scale_ptr, tl.where(sound, scale, float("nan")))


@triton.jit
def store_in_slot(
    x, slot, head, rows, row_block, row_slot, row_head, scales, scale_block, scale_slot, scale_head, tensor_scale, dims,
    mask, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """``_store_row`` of one head where the cache has ``slot``, which is not negative; strides as of ``rows`` and ``scales``."""
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    _store_row(
        x.to(tl.float32),
        rows + block * row_block + offset * row_slot + head * row_head,
        scales + block * scale_block + offset * scale_slot + head * scale_head,
        tensor_scale,
        dims,
        mask,
        KIND,
    )


def scale_arguments(scales: torch.Tensor | None, rows: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    # Unscaled formats never touch the pointer.
    return (rows, (0, 0, 0)) if scales is None else (scales, scales.stride())
