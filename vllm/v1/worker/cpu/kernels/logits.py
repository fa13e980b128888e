# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters applied to logits, and the log-probabilities of chosen tokens.

``logits`` is float ``[tokens, vocab]``; ``idx_mapping`` int32 ``[tokens]`` names the request
slot of each row; parameters are float32 ``[max_num_reqs]``.
"""

import numpy as np
import torch


def temperature(
    logits: torch.Tensor,
    _logits_stride: int,
    idx_mapping: torch.Tensor,
    temperatures: torch.Tensor,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row by its request's temperature; 0 and 1 leave it as it is."""
    for token, slot in enumerate(idx_mapping.tolist()):
        value = np.float32(temperatures[slot].item())
        if value not in (0.0, 1.0):
            _store(logits[token, :vocab_size], _row(logits, token, vocab_size) / value)


def min_p(
    logits: torch.Tensor,
    _logits_stride: int,
    idx_mapping: torch.Tensor,
    min_ps: torch.Tensor,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Mask tokens that are less probable than ``min_p`` times the best one."""
    for token, slot in enumerate(idx_mapping.tolist()):
        share = np.float32(min_ps[slot].item())
        if share == 0.0:
            continue
        row = _row(logits, token, vocab_size)
        threshold = np.fmax.reduce(row) + np.log(share)
        _store(logits[token, :vocab_size], np.where(row < threshold, -np.inf, row))


def penalties(
    logits: torch.Tensor,
    _logits_stride: int,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    local_positions: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_mask: torch.Tensor,
    _prompt_mask_stride: int,
    output_counts: torch.Tensor,
    _output_counts_stride: int,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Make tokens that came before less likely.

    Args:
        token_ids: int ``[tokens]``, the inputs; drafts before a row count as output.
        local_positions: int32 ``[tokens]``, how many drafts precede a row.
        prompt_mask: int32 ``[max_num_reqs, ceil(vocab / 32)]``, a bit for each token.
        output_counts: int32 ``[max_num_reqs, vocab]``.

    """
    for token, slot in enumerate(idx_mapping.tolist()):
        repeat, often, once = (np.float32(values[slot].item()) for values in (repetition, frequency, presence))
        if repeat == 1.0 and often == 0.0 and once == 0.0:
            continue
        row = _row(logits, token, vocab_size)
        counts = output_counts.numpy()[slot, :vocab_size]
        drafts = int(local_positions[token])
        if drafts > 0:
            counts = counts.copy()
            np.add.at(counts, token_ids.numpy()[token - drafts + 1 : token + 1], 1)
        seen = counts > 0
        if repeat != 1.0:
            bits = np.unpackbits(prompt_mask[slot].numpy().view(np.uint8), bitorder="little")
            scale = np.where(bits[:vocab_size].astype(bool) | seen, repeat, np.float32(1))
            row = row * np.where(row > 0, np.float32(1) / scale, scale)
        # The counts become float32: numpy would go on in float64 with integers.
        row = row - often * counts.astype(np.float32)
        _store(logits[token, :vocab_size], row - once * seen.astype(np.float32))


def topk_log_softmax(
    output: torch.Tensor,
    logits: torch.Tensor,
    _logits_stride: int,
    token_ids: torch.Tensor,
    _token_ids_stride: int,
    count: int,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the log-probabilities of ``token_ids`` int64 ``[tokens, count]``, float32."""
    blocks = -(-vocab_size // BLOCK_SIZE)
    for token in range(output.shape[0]):
        row = _row(logits, token, vocab_size)
        highest = np.fmax.reduce(row)
        exps = np.zeros(blocks * BLOCK_SIZE, np.float32)
        np.exp(row - highest, out=exps[:vocab_size])
        total = np.float32(0)
        # Block by block, as the kernel adds: float32 sums depend on the order.
        for part in exps.reshape(blocks, BLOCK_SIZE):
            total += part.sum()
        chosen = row[token_ids.numpy()[token, :count]]
        output.view(-1).numpy()[token * count : (token + 1) * count] = chosen - highest - np.log(total)


def ranks(
    output: torch.Tensor,
    logits: torch.Tensor,
    _logits_stride: int,
    token_ids: torch.Tensor,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Write how many tokens are at least as likely as ``token_ids`` int64 ``[tokens]``."""
    for token, chosen in enumerate(token_ids.tolist()):
        row = _row(logits, token, vocab_size)
        rank = int(np.count_nonzero(row >= row[chosen]))
        if row[chosen] == -np.inf:
            # The kernel's padding up to a whole block is -inf and counts as well.
            rank += -vocab_size % BLOCK_SIZE
        output[token] = rank


def apply_top_k_top_p(
    scores: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    mask_value: float = float("-inf"),
    has_topp_only_rows: bool = True,
) -> torch.Tensor:
    """Mask all but the ``k`` best tokens and the share ``p`` of probability, by sorting.

    Stands in for a Triton kernel that Triton's interpreter cannot run: its loop over rows
    calls a method of a compiled integer.  ``k`` int32 and ``p`` float32 are ``[tokens]``.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    if mask_value != float("-inf"):
        raise NotImplementedError(f"top-k and top-p mask with -inf on CPU, not with {mask_value}")
    return apply_top_k_top_p_pytorch(scores, k, p, allow_cpu_sync=True)


def _row(logits: torch.Tensor, token: int, vocab_size: int) -> np.ndarray:
    """One row as float32 ``[vocab]``: the memory itself if it is float32, else a copy."""
    return logits[token, :vocab_size].float().numpy()


def _store(target: torch.Tensor, values: np.ndarray) -> None:
    target.copy_(torch.from_numpy(values))
