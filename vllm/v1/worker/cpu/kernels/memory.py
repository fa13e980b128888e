# SPDX-License-Identifier: Apache-2.0
"""Memory that a kernel is given as an integer address rather than as a tensor."""

import ctypes
from typing import Any

import numpy as np

INT32_BYTES = 4


class _Span:
    """What numpy needs to see memory at an address as an array."""

    def __init__(self, address: int, kind: str, shape: tuple[int, ...], strides: Any):
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": kind,
            "shape": shape,
            "strides": strides,
        }


def int32_rows(address: int, rows: int, columns: int) -> np.ndarray:
    """View ``[rows, columns]`` int32 at ``address``; nothing is copied or kept alive."""
    return np.asarray(_Span(address, "<i4", (rows, columns), None))


def byte_rows(address: int, rows: int, columns: int, row_stride: int) -> np.ndarray:
    """View ``[rows, columns]`` uint8 at ``address``, rows ``row_stride`` bytes apart."""
    return np.asarray(_Span(address, "|u1", (rows, columns), (row_stride, 1)))


def read_block_id(table: int, columns: int, row: int, column: int) -> int:
    """Read one entry of the int32 block table ``[*, columns]`` at address ``table``.

    Raises IndexError for a column outside the row: the address would be valid memory,
    and a block of another request would be taken for this one's.
    """
    if row < 0 or not 0 <= column < columns:
        raise IndexError(
            f"block table entry [{row}, {column}] asked for, but rows have {columns} "
            "columns; the request's number of computed tokens and its blocks disagree"
        )
    offset = (row * columns + column) * INT32_BYTES
    return ctypes.c_int32.from_address(table + offset).value


def copy_bytes(destination: int, source: int, count: int) -> None:
    """Copy ``count`` bytes; the two ranges may overlap.  A count below 1 copies nothing."""
    if count > 0:
        ctypes.memmove(destination, source, count)


def clear_bytes(address: int, count: int) -> None:
    """Set ``count`` bytes to zero."""
    ctypes.memset(address, 0, count)
