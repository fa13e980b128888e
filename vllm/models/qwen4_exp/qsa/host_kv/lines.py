# SPDX-License-Identifier: Apache-2.0
"""Rows of whole lines: how a token's K/V lies in host memory, and in the arena that it is copied to.

A kernel that reads host memory fetches it in lines of 128 bytes over PCIe, and a part of a line
costs what a line does. An int8 row of two heads has 1,040 bytes: one after the other, rows begin
at any multiple of 16, and each of its keys and values of 256 bytes touches three lines, as many
bytes as bf16 has. So a row takes whole lines, here 1,152 bytes: two for each key and value, and
one for all scales. bf16 rows are whole lines at the published width, and stay as they are.
"""

import torch

LINE = 128


def whole_lines(size: int) -> int:
    """``size`` bytes, rounded up to lines."""
    return -(-size // LINE) * LINE


def by_head(rows: torch.Tensor, heads: int, content: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows as a layer's cache: the heads of a token side by side, and what pads the row in no view.

    Args:
        rows: ``[blocks, block_size, row_bytes]`` uint8, rows one after the other.
        heads: K/V heads of this rank.
        content: elements of ``dtype`` that a head takes.
        dtype: of the cache.

    Returns ``[blocks, heads, block_size, content]``, nothing copied.
    """
    return rows.view(dtype)[..., : heads * content].unflatten(-1, (heads, content)).transpose(1, 2)


def whole_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """The reverse of ``by_head``: ``[blocks, block_size, row_bytes]`` uint8, contiguous, with what pads the rows."""
    blocks, _, size, _ = kv_cache.shape
    row = kv_cache.stride(2)
    assert kv_cache.stride(0) == size * row, "rows have to follow one another"
    return kv_cache.as_strided((blocks, size, row), (size * row, row, 1)).view(torch.uint8)
