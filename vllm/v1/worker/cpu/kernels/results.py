# SPDX-License-Identifier: Apache-2.0
"""What a step's sampled tokens change in the states of its requests.

``idx_mapping`` int32 ``[num_reqs]`` names the slot of each row of the batch; -1 marks a
request that ended meanwhile (pipeline stages learn of tokens steps later).  Per-slot
tensors are int32 ``[max_num_reqs]`` where nothing else is said.
"""

from typing import Any

import numpy as np
import torch


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
) -> None:
    """Correct ``num_sampled`` and set ``num_rejected``, both int32 ``[num_reqs]``.

    A row whose prompt is not read to its end (``seq_lens`` int32 ``[num_reqs]``) has
    neither.  ``cu_num_logits`` is int32 ``[num_reqs + 1]``.
    """
    rows = len(idx_mapping)
    unread = seq_lens.numpy()[:rows] < prefill_lens.numpy()[idx_mapping.numpy()]
    sampled = num_sampled.numpy()[:rows]
    sampled[unread] = 0
    logits = np.diff(cu_num_logits.numpy()[: rows + 1])
    num_rejected.numpy()[:rows] = np.where(unread, 0, logits - sampled)


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    _output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,
    _sampled_tokens_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    _all_token_ids_stride: int,
    total_lens: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_tokens_out: torch.Tensor | None,
    num_draft_tokens: int,
    **_launch: Any,
) -> None:
    """Append the sampled tokens to their requests and advance the counters.

    Args:
        last_sampled_tokens: int64, one per slot.
        output_bin_counts: int32 ``[max_num_reqs, vocab]``, how often each was sampled.
        sampled_tokens: int64 ``[num_reqs, drafts + 1]``.
        num_sampled, num_rejected: int32 ``[num_reqs]``.
        all_token_ids: int32 ``[max_num_reqs, max_model_len]``.
        draft_tokens, draft_tokens_out: int64 ``[num_reqs, num_draft_tokens]`` in rows of
            the batch, and ``[max_num_reqs, num_draft_tokens]`` in slots.

    """
    sampled, rejected = num_sampled.tolist(), num_rejected.tolist()
    bounds = query_start_loc.tolist() if query_start_loc is not None else None
    tokens, known = sampled_tokens.numpy(), all_token_ids.numpy()
    computed, totals = num_computed_tokens.numpy(), total_lens.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        if draft_tokens is not None:
            drafts = draft_tokens.numpy()[row, :num_draft_tokens]
            draft_tokens_out.numpy()[slot, :num_draft_tokens] = drafts
        count, total = sampled[row], int(totals[slot])
        if count > 0:
            new = tokens[row, :count]
            known[slot, total : total + count] = new
            last_sampled_tokens.view(-1)[slot] = int(new[-1])
            totals[slot] = total + count
            if output_bin_counts is not None:
                # add.at counts a token that comes twice among the new ones twice.
                np.add.at(output_bin_counts.numpy()[slot], new, 1)
        length = bounds[row + 1] - bounds[row] if bounds is not None else 0
        computed[slot] += length - rejected[row]


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """Count each row's tokens as computed, for models that sample nothing."""
    rows = len(idx_mapping)
    lengths = np.diff(query_start_loc.numpy()[: rows + 1])
    num_computed_tokens.numpy()[idx_mapping.numpy()] += lengths


def scatter_num_accepted(idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Set each slot's ``num_accepted`` to its row's ``num_sampled``, at least 1."""
    slots = idx_mapping.numpy()
    kept = slots >= 0
    values = np.maximum(num_sampled.numpy()[: len(slots)], 1)
    num_accepted.numpy()[slots[kept]] = values[kept]


def fill_num_accepted(idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int) -> None:
    """Set ``num_accepted`` of every slot of the batch to ``num_sampled``."""
    slots = idx_mapping.numpy()
    num_accepted.numpy()[slots[slots >= 0]] = num_sampled
