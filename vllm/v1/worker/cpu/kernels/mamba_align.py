# SPDX-License-Identifier: Apache-2.0
"""When recurrent state moves between blocks, so that prefixes can be cached.

With prefix caching a recurrent state is kept for every full block of tokens ("align"
mode).  A request runs in the block of its last token; when it enters the next one, its
state moves along (``preprocess`` decides, ``precopy`` copies), and after the step the
state at the block's end is put where the cache expects it (``postprocess``).

Per-slot tensors are int32 ``[max_num_reqs]``: ``state_idx`` the column of the running
block, ``num_accepted`` how many tokens of the last step stand.  The twelve tensors that
describe the states are those of ``StateCopier``.
"""

from typing import Any

import numpy as np
import torch

from .state_blocks import StateCopier


def preprocess_mamba_align(
    idx_mapping: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted: torch.Tensor,
    source_columns: torch.Tensor,
    source_biases: torch.Tensor,
    num_reqs: int,
    *,
    BLOCK_SIZE: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Advance ``state_idx`` to the block of this step's last token.

    ``source_columns`` and ``source_biases`` (per slot) keep where the state is before
    the step.  A request that enters another block starts there with one accepted token.
    """
    slots = idx_mapping.numpy()[:num_reqs]
    columns, accepted = state_idx.numpy(), num_accepted.numpy()
    old = columns[slots]
    source_columns.numpy()[slots] = old
    source_biases.numpy()[slots] = np.maximum(accepted[slots] - 1, 0)
    lengths = np.diff(query_start_loc.numpy()[: num_reqs + 1])
    after = num_computed_tokens.numpy()[slots] + lengths
    new = (after + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
    columns[slots] = new
    accepted[slots[(old >= 0) & (old != new)]] = 1


def precopy_mamba_align(
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    source_biases: torch.Tensor,
    tables: torch.Tensor,
    columns: int,
    address: torch.Tensor,
    block_stride: torch.Tensor,
    item: torch.Tensor,
    inner: torch.Tensor,
    window: torch.Tensor,
    group: torch.Tensor,
    channels: torch.Tensor,
    channel_stride: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    num_reqs: int,
    *,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = True,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Copy the state of every request that enters another block into that block."""
    old, new = source_columns.tolist(), state_idx.tolist()
    copier = None
    for slot in _slots(idx_mapping if HAS_IDX_MAPPING else None, num_reqs):
        if old[slot] < 0 or old[slot] == new[slot]:
            continue
        # Most steps move nothing and need no description of the states.
        copier = copier or StateCopier(
            tables,
            columns,
            (address, block_stride, item, inner, window, group, channels, channel_stride),
            CONV_STATE_DIM_FIRST,
        )
        copier.copy(slot, old[slot], new[slot], int(source_biases[slot]))


def postprocess_mamba(
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_scheduled_tokens: torch.Tensor | None,
    num_computed_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor | None,
    tables: torch.Tensor,
    columns: int,
    address: torch.Tensor,
    block_stride: torch.Tensor,
    item: torch.Tensor,
    inner: torch.Tensor,
    window: torch.Tensor,
    group: torch.Tensor,
    channels: torch.Tensor,
    channel_stride: torch.Tensor,
    num_accepted_out: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    num_reqs: int,
    *,
    block_size: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Save the state at the last full block's end, where this step has passed it.

    ``num_computed_tokens`` are those after the step (``PRECOMPUTED_NEW_COMPUTED``), or
    before it, and then the scheduled, draft and accepted tokens are added up here.
    ``num_accepted_out`` becomes 1 where the state stays in its block.
    """
    if len(address) == 0:  # a pipeline stage without recurrent layers
        return
    copier = None
    for slot in _slots(idx_mapping if HAS_IDX_MAPPING else None, num_reqs):
        accepted, source = int(num_accepted[slot]), int(state_idx[slot])
        # ``after``: tokens computed by the end of the step; ``running``: how many of them
        # the state in the column ``source`` stands for.
        if PRECOMPUTED_NEW_COMPUTED:
            after = int(num_computed_tokens[slot])
            running = after - accepted + 1
        else:
            scheduled = int(num_scheduled_tokens[slot]) - int(num_draft_tokens[slot])
            running = int(num_computed_tokens[slot]) + scheduled
            after = running + accepted - 1
        full_blocks = after // block_size
        bias = full_blocks * block_size - running
        if bias < 0:
            continue
        target = full_blocks - 1
        if source == target:
            num_accepted_out[slot] = 1
            if bias == 0:
                continue
        copier = copier or StateCopier(
            tables,
            columns,
            (address, block_stride, item, inner, window, group, channels, channel_stride),
            CONV_STATE_DIM_FIRST,
        )
        copier.copy(slot, source, target, bias)


def _slots(idx_mapping: torch.Tensor | None, num_reqs: int) -> Any:
    """Slots of the batch's requests; -1 marks one that ended meanwhile."""
    if idx_mapping is None:
        return range(num_reqs)
    return [slot for slot in idx_mapping[:num_reqs].tolist() if slot >= 0]
