# SPDX-License-Identifier: Apache-2.0
"""GPU memory of a fixed size through which prompts read rows from host memory, a section at a time.

It has two halves. While attention reads the section in one, the next is copied to the other
on a stream of its own. All sparse layers of a stage take turns with one arena.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from .copy_rows import copy_rows
from .lines import LINE

_ARENAS: dict[torch.device, "Arena"] = {}


class Arena:
    """Two halves of equal size on one device."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Take ``size`` bytes of ``device``."""
        self.size = size
        # Whole cache lines, so that the second half is as aligned as the first.
        self._halves = torch.empty(2, size // 2 // LINE * LINE, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        # Per half: its section has arrived; attention is done with it.
        self._arrived = [torch.cuda.Event() if cuda else None for _ in range(2)]
        self._read = [torch.cuda.Event() if cuda else None for _ in range(2)]

    def halves(self, row_bytes: int) -> torch.Tensor:
        """``[2, rows, row_bytes]`` uint8: room for a section's rows, twice."""
        rows = self._halves.shape[1] // row_bytes
        return self._halves[:, : rows * row_bytes].unflatten(1, (rows, row_bytes))

    def sections(self, host: torch.Tensor, slots: torch.Tensor, size: torch.Tensor, count: int) -> Iterator[int]:
        """Copy ``count`` sections of the rows that ``slots`` lists, and yield the number of each when it may be read.

        Section ``n`` is in half ``n % 2``, until the next but one is asked for. Rows beyond ``size`` are not copied;
        what stands there is what was there before.

        Args:
            host: ``[pool, row_bytes]`` uint8, as the device sees host memory.
            slots: ``[>= size]`` int32 rows of ``host``.
            size: ``[]`` int32 on the device.
            count: sections, of which those beyond ``size`` are empty.

        """
        halves = self.halves(host.shape[1])
        if self._stream is None:
            for section in range(count):
                copy_rows(host, slots, size, section * halves.shape[1], halves[section % 2])
                yield section
            return
        main = torch.cuda.current_stream()
        # Rows of this step were written on the main stream, and the layer before read both halves there.
        self._stream.wait_stream(main)
        for name in (slots, size):
            name.record_stream(self._stream)
        for section in range(min(1, count)):
            self._copy(host, slots, size, section, halves)
        for section in range(count):
            if section + 1 < count:
                if section:
                    self._stream.wait_event(self._read[(section + 1) % 2])
                self._copy(host, slots, size, section + 1, halves)
            main.wait_event(self._arrived[section % 2])
            yield section
            self._read[section % 2].record(main)

    def _copy(self, host, slots, size, section: int, halves) -> None:
        half = halves[section % 2]
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            copy_rows(host, slots, size, section * half.shape[0], half)
            self._arrived[section % 2].record(self._stream)


def arena_on(device: torch.device, size: int) -> Arena:
    """The device's arena, made when first asked for."""
    arena = _ARENAS.get(device)
    if arena is None or arena.size != size:
        arena = _ARENAS[device] = Arena(size, device)
    return arena


def workspace_bytes(layer: Any, rows: int) -> int:
    """GPU memory beside the arena that ``prompt_attention`` takes for ``rows`` tokens of a layer, at most.

    Per selected row: its number (int32). Per token: a float32 sum for every head, and its columns in each of 128 sections,
    which are 3.1 million tokens of bf16 in an arena of 96 MiB. Beside them 5 bytes for a group of the pool, its mark and its
    number, and 4 for one of the union. How large the pool will be is not known yet: 8 MiB are enough for 6.4 million tokens.
    """
    width = layer.indexer.packed_output_width
    per_token = width * 4 + layer.num_heads * layer.head_dim * 4 + 128 * 8
    return rows * per_token + (8 << 20)


def take_arena(layer: Any, output: torch.Tensor) -> None:
    """Make a GPU's arena, and take for a moment what sections use beside it, in a pass that skips attention.

    So both stand in the memory profile, the arena because it stays. Nothing on a CPU, without rows in host memory, or
    under graph capture, where what is allocated stays in the graph's pool.

    Args:
        layer: the sparse-attention layer.
        output: its output of the pass, ``[tokens, ...]``.
    """
    rows = getattr(layer, "host_rows", None)
    if output.device.type != "cuda" or rows is None or torch.cuda.is_current_stream_capturing():
        return
    arena_on(output.device, rows.arena_bytes)
    torch.empty(workspace_bytes(layer, output.shape[0]), dtype=torch.uint8, device=output.device)
