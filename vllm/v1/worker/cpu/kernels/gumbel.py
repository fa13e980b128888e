# SPDX-License-Identifier: Apache-2.0
"""The sampler's noise, bit for bit as the kernel of ``gpu/sample/gumbel.py`` draws it.

A token is sampled as the argmax of its logits plus Gumbel noise, -log(-log(u)).  The
uniform u is a hash (murmur3, 32 bit) of the request's seed, the position and the token
id: the same request draws the same noise however it is batched.
"""

import numpy as np
import torch

_WORD = 0xFFFFFFFF
# Keeps a draft's noise apart from that of its verification.
_DRAFT_SALT = 1 << 30
# Second hash, for the upper half of a 64-bit draw.
_UPPER_HALF = 0x9E3779B9

Words = np.ndarray | int


def _rotate(value: Words, bits: int) -> Words:
    return ((value << bits) & _WORD) | (value >> (32 - bits))


def _mix(state: int, key: Words) -> Words:
    """One round of murmur3 in 64-bit integers, cut to 32 bits after each product."""
    key = _rotate((key * 0xCC9E2D51) & _WORD, 15)
    key = (key * 0x1B873593) & _WORD
    return (_rotate(state ^ key, 13) * 5 + 0xE6546B64) & _WORD


def hash32(seed: int, pos: int, ids: np.ndarray, domain: int = 0) -> np.ndarray:
    """Hash ``seed`` (64 bit) and ``pos`` with every id: uint64 ``[n]`` below 2^32."""
    state = domain
    for word in (seed & _WORD, (seed >> 32) & _WORD, pos & _WORD):
        state = _mix(state, word)
    mixed = _mix(state, ids.astype(np.uint64)) ^ 16
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _WORD
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _WORD
    return mixed ^ (mixed >> 16)


def noise32(seed: int, pos: int, ids: np.ndarray) -> np.ndarray:
    """Gumbel noise float32 ``[n]`` for the token ids ``[n]``."""
    bits = hash32(seed, pos, ids)
    high, low = (bits >> 16).astype(np.float32), (bits & 0xFFFF).astype(np.float32)
    # (bits + 0.5) / 2^32, rounded once: each half is exact.
    uniform = high * np.float32(2.0**-16) + (low + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-_log_of_one_minus(uniform))


def _log_of_one_minus(u: np.ndarray) -> np.ndarray:
    """log(1 - u) in float32: eight terms of its series below 1/4, directly above.

    The largest noise, which decides, comes from the smallest u, where 1 - u is rounded.
    """
    terms = np.float32(1 / 8)
    for n in range(7, 0, -1):
        terms = np.float32(1 / n) + u * terms
    direct = np.log(np.maximum(np.float32(1) - u, np.float32(2.0**-24)))
    return np.where(u < 0.25, -u * terms, direct)


def noise64(seed: int, pos: int, ids: np.ndarray) -> np.ndarray:
    """Gumbel noise float64 ``[n]``, from 53 random bits."""
    high = hash32(seed, pos, ids, _UPPER_HALF)
    bits = ((high << 32) | hash32(seed, pos, ids)) >> 11
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    # The largest rounds to 1, whose logarithm is 0.
    uniform = np.where(uniform == 1.0, uniform - 2.0**-53, uniform)
    return -np.log(-np.log(uniform))


def gumbel_sample(
    block_argmax: torch.Tensor,
    _block_argmax_stride: int,
    block_max: torch.Tensor,
    _block_max_stride: int,
    cache: torch.Tensor | None,
    _cache_stride_0: int,
    _cache_stride_1: int,
    cache_column: torch.Tensor | None,
    cache_source: torch.Tensor | None,
    _cache_source_stride: int,
    logits: torch.Tensor,
    _logits_stride: int,
    idx_mapping: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Best token of each block of the vocabulary, with noise where a request samples.

    Args:
        block_argmax, block_max: int64 and float ``[tokens, blocks]``, the results: token
            id and noised logit.  The lower id wins a tie; NaN never wins.
        cache: ``[max_num_reqs, columns, vocab]``; gets each row of ``cache_source``
            ``[tokens, vocab]`` before temperature, in the column ``cache_column``
            (int, one for all or one a token), which also goes into the seed.
        logits: float ``[tokens, vocab]``.
        idx_mapping: int32 ``[tokens]``, request slots; -1 is greedy.
        seeds, temperatures: int64 and float32 ``[max_num_reqs]``; 0 is greedy.
        positions: int64 ``[tokens]``.

    """
    kind = np.float64 if USE_FP64 else np.float32
    blocks = block_argmax.shape[1]
    ids = np.arange(vocab_size)
    scores = np.full(blocks * BLOCK_SIZE, -np.inf, dtype=kind)
    for token, slot in enumerate(idx_mapping.tolist()):
        row = logits[token, :vocab_size].float().numpy()
        known = slot >= 0
        temperature = float(temperatures[slot]) if known else 0.0
        seed = int(seeds[slot]) if known else 0
        if cache is not None:
            column = int(cache_column[token] if PER_TOKEN_COL else cache_column)
            seed ^= column << 32
            if known:
                cache[slot, column, :vocab_size] = cache_source[token, :vocab_size]
        if temperature != 0.0 and APPLY_TEMPERATURE:
            row = row / np.float32(temperature)
        row = row.astype(kind, copy=False)
        if temperature != 0.0:
            pos = int(positions[token]) + (_DRAFT_SALT if IS_DRAFTING else 0)
            row = row + (noise64 if USE_FP64 else noise32)(seed, pos, ids)
        np.copyto(scores[:vocab_size], row)
        np.copyto(scores[:vocab_size], -np.inf, where=np.isnan(row))
        best = scores.reshape(blocks, BLOCK_SIZE).argmax(axis=1)
        best += np.arange(blocks) * BLOCK_SIZE
        block_argmax.numpy()[token] = best
        block_max.numpy()[token] = scores[best]
