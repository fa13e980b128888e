# SPDX-License-Identifier: Apache-2.0
"""From tensors to a kernel's arguments: checks, base pointers, strides."""

import math
from typing import NamedTuple

import torch

from .formats import BF16, FP8, INT8, KVFormat

# So much do Triton's loads want of a pointer to be as wide as they can.
_ALIGNED = 16
# Places, and distances between heads, that an int32 holds.
_INT32 = 2**31
_SCALE_BYTES = 4
_BY_DTYPE = {form.dtype: form for form in (BF16, FP8, INT8)}


class WrongInput(ValueError):
    """Tensors that do not fit together; the message has expected and actual."""


class Layout(NamedTuple):
    """Where rows lie, in elements that a kernel loads: constants of a deployment.

    Those elements are bf16, or 32-bit words of four one-byte numbers; of scales, fp32.
    A token's row is ``unit * (block * block_units + place * token_units)`` after the first.
    ``*_head`` are strides, ``*_shift`` the distance from the aligned pointer that is passed to the first row.
    ``paired_scales``: a value's scale is behind its key's, both on whole 8 bytes, so that one load has both.
    ``within_bits`` is 0 where an int32 holds that sum, and distances between heads.  In larger pools, whose rows are listed
    otherwise (``places.py``), it is how many bits a place in a block takes, one at least.
    """

    block_size: int
    unit: int
    block_units: int
    token_units: int
    key_head: int
    key_shift: int
    value_head: int
    value_shift: int
    scale_head: int
    paired_scales: bool
    within_bits: int


def require(holds: bool, what: str, expected: object, got: object) -> None:
    """Raises WrongInput unless ``holds``."""
    if not holds:
        raise WrongInput(f"{what}: expected {expected}, got {got}")


def form_of(keys: torch.Tensor) -> KVFormat:
    """The format of keys by their dtype, which tells them apart."""
    form = _BY_DTYPE.get(keys.dtype)
    require(form is not None, "dtype of keys", " or ".join(map(str, _BY_DTYPE)), keys.dtype)
    return form


def _words(rows: torch.Tensor, what: str) -> tuple[torch.Tensor, int, list[int]]:
    """Base, shift and strides of ``[blocks, block_size, kv_heads, dim]`` rows."""
    require(rows.stride(3) == 1, f"stride of the last axis of {what}", 1, rows.stride(3))
    size = rows.element_size()
    step = 4 if size == 1 else 1
    at = (rows.data_ptr() // size, *rows.stride()[:3])
    require(not any(n % step for n in at), f"address and strides of {what}", f"multiples of {step}", at)
    words = rows.view(torch.int32) if size == 1 else rows
    shift = words.data_ptr() % _ALIGNED // words.element_size()
    if shift > words.storage_offset():
        shift = 0
    base = words.as_strided((1,), (1,), words.storage_offset() - shift)
    return base, shift, [stride // step for stride in rows.stride()[:3]]


def _paired(key_scales: torch.Tensor | None, value_scales: torch.Tensor | None) -> bool:
    """Whether scales of one shape and strides lie as ``Layout.paired_scales`` says."""
    if key_scales is None:
        return False
    steps = (key_scales.data_ptr() // _SCALE_BYTES, *key_scales.stride())
    beside = value_scales.data_ptr() - key_scales.data_ptr() == _SCALE_BYTES
    return beside and not any(step % 2 for step in steps)


class Rows(NamedTuple):
    """A layer's rows as a kernel takes them."""

    form: KVFormat
    blocks: int
    layout: Layout
    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None


def rows_of(
    keys: torch.Tensor, values: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None
) -> Rows:  # fmt: skip
    """Check K/V and their scales against each other; see ``sparse_paged_attention``."""
    form = form_of(keys)
    require(keys.ndim == 4 and all(keys.shape), "keys", "[blocks, block_size, kv_heads, dim]", tuple(keys.shape))
    require(values.shape == keys.shape, "shape of values", tuple(keys.shape), tuple(values.shape))
    require(values.dtype == keys.dtype, "dtype of values", keys.dtype, values.dtype)
    key_base, key_shift, strides = _words(keys, "keys")
    value_base, value_shift, value_strides = _words(values, "values")
    require(value_strides[:2] == strides[:2], "strides of values", strides[:2], value_strides[:2])
    scale_head = 0
    for what, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        require((scales is not None) == form.scaled_rows, f"{what} of {form.name} rows", form.scaled_rows, scales)
        if scales is not None:
            require(scales.shape == keys.shape[:3], f"shape of {what}", tuple(keys.shape[:3]), tuple(scales.shape))
            require(scales.dtype == torch.float32, f"dtype of {what}", torch.float32, scales.dtype)
            expected = (*strides[:2], key_scales.stride(2))
            require(scales.stride() == expected, f"strides of {what}", expected, scales.stride())
            scale_head = scales.stride(2)
    unit = math.gcd(*strides[:2]) or 1
    last = ((keys.shape[0] - 1) * strides[0] + (keys.shape[1] - 1) * strides[1]) // unit
    # Blocks that hold several layers may be no more than a multiple of 8 bytes apart: then 16 GiB are the most.
    wide = max(last, (keys.shape[2] - 1) * max(strides[2], value_strides[2], scale_head)) >= _INT32
    within_bits = max(1, (keys.shape[1] - 1).bit_length()) if wide else 0
    most = 2**31 >> within_bits
    require(not wide or keys.shape[0] <= most, f"blocks of {keys.shape[1]} tokens", f"{most} at most", keys.shape[0])
    layout = Layout(
        keys.shape[1], unit, strides[0] // unit, strides[1] // unit, strides[2], key_shift, value_strides[2],
        value_shift, scale_head, _paired(key_scales, value_scales), within_bits,
    )  # fmt: skip
    return Rows(form, keys.shape[0], layout, key_base, value_base, key_scales, value_scales)


def check_queries(q: torch.Tensor, kv_heads: int, dim: int) -> int:
    """Queries per K/V head of ``q`` ``[rows, heads, dim]``."""
    require(q.ndim == 3 and q.shape[2] == dim, "queries", f"[rows, heads, {dim}]", tuple(q.shape))
    require(q.dtype == torch.bfloat16, "dtype of queries", torch.bfloat16, q.dtype)
    # Four planes, and the matrix units take 16 numbers at a time.
    require(dim >= 64 and not dim & (dim - 1), "dim", "a power of two, 64 at least", dim)
    require(q.stride(2) == 1, "stride of the last axis of queries", 1, q.stride(2))
    require(q.shape[1] % kv_heads == 0, "query heads", f"a multiple of {kv_heads} K/V heads", q.shape[1])
    return q.shape[1] // kv_heads


def check_selection(
    rows: int, selected: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor
) -> int:  # fmt: skip
    """Width of the lists in ``selected`` ``[rows, width + 1]``."""
    require(selected.ndim == 2 and selected.shape[0] == rows, "selected", f"[{rows}, width + 1]", tuple(selected.shape))
    require(selected.shape[1] > 1, "columns of selected", "one and the count", selected.shape[1])
    require(selected.is_contiguous(), "strides of selected", "contiguous", selected.stride())
    require(block_table.ndim == 2 and all(block_table.shape), "block_table", "[requests, n]", tuple(block_table.shape))
    require(block_table.stride(1) == 1, "stride of the last axis of block_table", 1, block_table.stride(1))
    require(token_to_req.shape == (rows,), "token_to_req", (rows,), tuple(token_to_req.shape))
    for what, tensor in (("selected", selected), ("block_table", block_table), ("token_to_req", token_to_req)):
        require(tensor.dtype == torch.int32, f"dtype of {what}", torch.int32, tensor.dtype)
    return selected.shape[1] - 1


def gate_of(output_gate: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``output_gate`` as ``[rows, heads, dim]`` beside an ``out`` of that shape."""
    gate = output_gate.view(out.shape) if output_gate.numel() == out.numel() else output_gate
    require(gate.shape == out.shape, "output_gate", tuple(out.shape), tuple(gate.shape))
    for what, tensor in (("output_gate", gate), ("out", out)):
        require(tensor.stride(2) == 1, f"stride of the last axis of {what}", 1, tensor.stride(2))
    return gate
