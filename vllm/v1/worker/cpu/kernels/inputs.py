# SPDX-License-Identifier: Apache-2.0
"""Inputs of one step: token ids, positions, lengths.

Requests live in slots; ``idx_mapping`` int32 ``[num_reqs]`` names the slot of each row of
the batch.  ``query_start_loc`` int32 ``[num_reqs + 1]`` bounds each row's tokens.
Per-slot tensors are int32 ``[max_num_reqs]`` where nothing else is said.
"""

from typing import Any

import numpy as np
import torch


def token_request_mapping(
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_launch: Any,
) -> None:
    """Write the row of the batch that owns each token to int32 ``output[:num_tokens]``.

    Tokens from ``num_mapped`` on are padding and belong to row 0.
    """
    mapped = min(num_mapped, num_tokens)
    ends = query_start_loc.numpy()[1 : num_reqs + 1]
    owner = np.searchsorted(ends, np.arange(mapped), side="right")
    out = output.numpy()
    out[:mapped] = np.minimum(owner, num_reqs - 1)
    out[mapped:num_tokens] = 0


def prepare_pos_seq_lens(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_reqs: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set ``positions`` int64 ``[tokens]`` and ``seq_lens`` int32 ``[max_num_reqs]``.

    Lengths of rows that the batch does not use become 0.
    """
    rows = len(idx_mapping)
    bounds = query_start_loc.numpy()[: rows + 1]
    counts = np.diff(bounds)
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    lengths = seq_lens.numpy()
    lengths[:rows] = computed + counts
    lengths[rows:max_num_reqs] = 0
    begin, end = bounds[0], bounds[-1]
    # Position within the row, plus what the row had computed before.
    shift = np.repeat(computed - bounds[:-1], counts)
    positions.numpy()[begin:end] = np.arange(begin, end) + shift


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    _next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    _all_token_ids_stride: int,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    *,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy each prefilling request's next tokens into ``input_ids`` int32 ``[tokens]``.

    ``next_prefill_tokens`` int32 ``[num_lookahead, max_num_reqs]`` gets the tokens after
    those, 0 past the end of the prompt.  ``all_token_ids`` is int32 ``[max_num_reqs,
    max_model_len]``.
    """
    bounds = query_start_loc.tolist()
    ids, following = input_ids.numpy(), next_prefill_tokens.numpy()
    known = all_token_ids.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        length, done = int(prefill_lens[slot]), int(num_computed_tokens[slot])
        if done >= length:
            continue
        begin, end = bounds[row], bounds[row + 1]
        after = done + end - begin
        ids[begin:end] = known[slot, done:after]
        left = max(0, min(num_lookahead, length - after))
        following[:left, slot] = known[slot, after : after + left]
        following[left:num_lookahead, slot] = 0


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    _draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    *,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Put the last sampled token and the drafts into ``input_ids``, and say where.

    A row with n logits (``cu_num_logits`` int32 ``[num_reqs + 1]``) takes them from its
    last n tokens: ``logits_indices`` int64 ``[logits]``.  While a prompt is still being
    read, those are its own tokens and stay.

    Args:
        last_sampled: int64, one per slot.
        seq_lens: int32, one per row.
        draft_tokens: int64 ``[max_num_reqs, drafts]``.

    """
    bounds, logits = query_start_loc.tolist(), cu_num_logits.tolist()
    lengths = seq_lens.tolist()
    ids, indices = input_ids.numpy(), logits_indices.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        count = logits[row + 1] - logits[row]
        end = bounds[row + 1]
        begin = end - count
        indices[logits[row] : logits[row + 1]] = np.arange(begin, end)
        prompt = int(prefill_lens[slot])
        if lengths[row] <= prompt:
            continue
        if NUM_NEW_SAMPLED_TOKENS and lengths[row] - count >= prompt:
            ids[begin] = last_sampled.view(-1)[slot]
        drafts = count - NUM_NEW_SAMPLED_TOKENS
        if drafts > 0:
            ids[end - drafts : end] = draft_tokens.numpy()[slot, :drafts]
