# SPDX-License-Identifier: Apache-2.0
"""Block tables and slot mappings of ``vllm/v1/worker/gpu/block_table.py`` and its buffers.

A block table is int32 ``[max_num_reqs, max_num_blocks]``, one for each KV cache group
(g); kernels get the addresses of all of them in one uint64 ``[g]``.  Rows are request
slots; ``idx_mapping`` int32 ``[num_reqs]`` says which slot each row of the batch is.
"""

from typing import Any

import numpy as np
import torch

from .memory import INT32_BYTES, clear_bytes, int32_rows


def gather_block_tables(
    grid: tuple[int, int],
    idx_mapping: torch.Tensor,
    source_addresses: torch.Tensor,
    target_addresses: torch.Tensor,
    widths: torch.Tensor,
    num_blocks: torch.Tensor,
    _num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens: torch.Tensor,
    window_reach: torch.Tensor,
    block_sizes: torch.Tensor,
    *,
    MASK_SLIDING_WINDOW: bool,
    BLOCK_SIZE: int,
) -> None:
    """Copy the rows of the batch's requests into the tables that attention reads.

    Args:
        grid: ``(g, rows)``; rows from ``num_reqs`` on are set to the null block 0.  Only
            the grid says how many rows an earlier, larger batch left behind.
        widths: int64 ``[g]``, columns of both tables.
        num_blocks: int32 ``[g, max_num_reqs]``; columns past it are left as they are.
        num_computed_tokens: int32 ``[max_num_reqs]``, read for sliding windows only.
        window_reach: int32 ``[g]``, tokens before the first scheduled one that can still
            be attended; blocks wholly before those become null.  0: no window.

    """
    slots = idx_mapping[:num_reqs].tolist()
    counts = num_blocks.numpy()
    height = max(slots, default=-1) + 1
    tables = zip(source_addresses.tolist(), target_addresses.tolist(), widths.tolist())
    for group, (source, target, width) in enumerate(tables):
        old = int32_rows(source, height, width)
        new = int32_rows(target, grid[1], width)
        for row, slot in enumerate(slots):
            used = counts[group, slot]
            new[row, :used] = old[slot, :used]
        new[num_reqs:] = 0
        if MASK_SLIDING_WINDOW and (reach := int(window_reach[group])) > 0:
            first = num_computed_tokens.numpy()[slots]
            unseen = np.maximum(first - reach, 0) // int(block_sizes[group])
            for row, slot in enumerate(slots):
                new[row, : min(unseen[row], counts[group, slot])] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    table_addresses: torch.Tensor,
    widths: torch.Tensor,
    block_sizes: torch.Tensor,
    enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings: torch.Tensor,
    _slot_mappings_stride: int,
    cp_rank: int,
    *,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write each token's slot, ``block * block_size + offset``, to int64 ``[g, max]``.

    ``PAD_ID`` stands where there is no slot: past the last token, for a request -1, in
    a group without mapping (recurrent state), and on ranks that hold other tokens.
    """
    bounds = query_start_loc.numpy()[: len(idx_mapping) + 1]
    slots = idx_mapping.numpy()
    begin, end = int(bounds[0]), int(bounds[-1])
    request = np.repeat(slots, np.diff(bounds))
    real = request >= 0
    pos = positions.numpy()[begin:end]
    height = int(slots.max(initial=-1)) + 1
    out = slot_mappings.numpy()[:, :max_num_tokens]
    out[:, end:] = PAD_ID
    groups = zip(
        table_addresses.tolist(),
        widths.tolist(),
        block_sizes.tolist(),
        enabled.tolist(),
        dcp_sharded.tolist(),
    )
    for group, (address, width, size, mapped, sharded) in enumerate(groups):
        if not mapped:
            out[group, begin:end] = PAD_ID
            continue
        here, local = real, pos
        if CP_SIZE != 1 and sharded:
            owner, local = _context_parallel(pos, size, CP_SIZE, CP_INTERLEAVE)
            here = real & (owner == cp_rank)
        block, offset = np.divmod(local, size)
        # Masked-out tokens look up entry [0, 0] of a table that may have no rows.
        found = np.zeros(end - begin, np.int64)
        found[here] = int32_rows(address, height, width)[request[here], block[here]]
        out[group, begin:end] = np.where(here, found * size + offset, PAD_ID)


def _context_parallel(pos: np.ndarray, size: int, ranks: int, interleave: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank that holds each position, and the position within that rank's blocks.

    Runs of ``interleave`` tokens go to the ranks in turn, within blocks that are
    ``ranks`` times as long as one rank's.
    """
    block, offset = np.divmod(pos, size * ranks)
    turn, rest = np.divmod(offset, interleave)
    return turn % ranks, block * size + turn // ranks * interleave + rest


def apply_write(
    output: torch.Tensor,
    row_stride: torch.Tensor | int,
    rows: torch.Tensor,
    starts: torch.Tensor,
    contents: torch.Tensor,
    ends: torch.Tensor,
    groups: torch.Tensor | None,
    *,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write ``contents[ends[i-1]:ends[i]]`` to row ``rows[i]`` from column ``starts[i]``.

    Args:
        output: the tensor, or with ``MULTI_GROUP`` uint64 ``[g]``, addresses of int32
            tables whose widths are ``row_stride`` int64 ``[g]``.
        rows, starts, ends: int32 ``[writes]``.
        contents: of the type of the tensor, end to end.

    """
    values = contents.numpy()
    first = 0
    for i, (row, start, last) in enumerate(zip(rows.tolist(), starts.tolist(), ends.tolist())):
        if MULTI_GROUP:
            group = int(groups[i])
            width = int(row_stride[group])
            line = int32_rows(int(output[group]), row + 1, width)[row]
        else:
            # A one-dimensional tensor has rows of one element.
            line = output.view(output.shape[0], -1).numpy()[row]
        if start + last - first > len(line):
            raise IndexError(
                f"{last - first} values written from column {start} of row {row}, which has {len(line)} columns"
            )
        line[start : start + last - first] = values[first:last]
        first = last


def zero_kv_blocks(
    addresses: torch.Tensor,
    block_strides: torch.Tensor,
    page_sizes: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    BLOCK_SIZE: int,
    **_launch: Any,
) -> None:
    """Clear newly allocated K/V blocks, in every segment (a layer's part of the pool).

    Args:
        addresses: uint64 ``[segments]``.
        block_strides, page_sizes: int64 ``[segments]``, counted in int32 elements.
        block_ids: int64 ``[blocks]``.

    """
    ids = block_ids.tolist()
    segments = zip(addresses.tolist(), block_strides.tolist(), page_sizes.tolist())
    for address, stride, page in segments:
        for block in ids:
            clear_bytes(address + block * stride * INT32_BYTES, page * INT32_BYTES)
