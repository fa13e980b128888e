# SPDX-License-Identifier: Apache-2.0
"""Copy one block of recurrent state to another column of a request's block table.

A layer keeps one or two states a block: a convolution window (the last few inputs) and
a recurrent state.  ``bias`` says how many of the tokens that the source column has
seen count towards the copy beyond the first (speculation; 0 without):

* window: its first ``bias`` tokens fall off, the others move to the front;
* recurrent state: one column is kept for each speculated token, so the column
  ``source + bias`` is copied whole.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .memory import byte_rows, copy_bytes, read_block_id


class State(NamedTuple):
    """One layer's state of one kind: where its blocks lie and what they look like."""

    address: int
    """Of block 0."""
    block_stride: int
    """Bytes from one block to the next; may exceed what a block holds."""
    item: int
    """Bytes of an element."""
    inner: int
    """Elements of a token in a window, or of the whole recurrent state."""
    window: int
    """Tokens in a convolution window; 0 for a recurrent state."""
    group: int
    """Which block table."""
    channels: int
    """Rows of a window that is laid out ``[channels, tokens]``."""
    channel_stride: int
    """Bytes from one such row to the next."""


class StateCopier:
    """Copies blocks of all states of the layers that this process runs.

    Args:
        tables: int64 ``[groups]``, addresses of int32 tables ``[*, columns]``.
        columns: columns of every table.
        fields: the members of ``State`` in their order, each int ``[states]``.
        channels_first: whether windows are ``[channels, tokens]``, not the transpose.

    """

    def __init__(
        self,
        tables: torch.Tensor,
        columns: int,
        fields: tuple[torch.Tensor, ...],
        channels_first: bool,
    ):
        self._tables = tables.tolist()
        self._columns = columns
        self._states = list(map(State, *(field.tolist() for field in fields)))
        self._channels_first = channels_first

    def copy(self, row: int, source: int, target: int, bias: int) -> None:
        """Copy row ``row``'s column ``source`` to column ``target``, in every state."""
        for state in self._states:
            if state.window == 0:
                (old,) = self._blocks(state, row, source + bias)
                (new,) = self._blocks(state, row, target)
                copy_bytes(new, old, state.inner * state.item)
                continue
            old, new = self._blocks(state, row, source, target)
            kept = max(state.window - bias, 0)
            if self._channels_first:
                window = state.window * state.item
                layout = (state.channels, window, state.channel_stride)
                # numpy sees where the two overlap and moves through a copy then.
                byte_rows(new, *layout)[:, : kept * state.item] = byte_rows(old, *layout)[
                    :, window - kept * state.item :
                ]
            else:
                token = state.inner * state.item
                copy_bytes(new, old + bias * token, kept * token)

    def _blocks(self, state: State, row: int, *columns: int) -> Iterator[int]:
        """Addresses of the blocks that the table names in ``columns``."""
        table = self._tables[state.group]
        for column in columns:
            block = read_block_id(table, self._columns, row, column)
            yield state.address + block * state.block_stride
