"""A step's rows as a layer stages them, from tokens to activations, with no model around."""

from __future__ import annotations

import time

import numpy as np
import torch

from vllm.models.qwen4_exp.ple_store.counters import Counters
from vllm.models.qwen4_exp.ple_store.fetch import RowFetcher
from vllm.models.qwen4_exp.ple_store.formats import dequantize
from vllm.models.qwen4_exp.ple_store.ngram_ids import NgramHash
from vllm.models.qwen4_exp.ple_store.reader import RowStore

VOCABULARY, HEADS, PER_NGRAM, EOS = 248320, 16, 8, 151643


class Steps:
    """Random steps over a store; all n-grams are different ones, which is the worst that can be asked of a disk."""

    def __init__(self, store: RowStore, counters: Counters, tokens: int, seed: int = 0) -> None:
        """``tokens``: of the largest step."""
        self.fetcher, self.counters = RowFetcher(store, counters), counters
        size = store.table.count // HEADS
        sizes = np.full(HEADS, size, dtype=np.int64)
        self.hash = NgramHash(
            np.array([0x9E3779B97F4A7 | 1, 0xC2B2AE3D27D4F, 0x165667B19E377], dtype=np.int64) >> 14,
            sizes,
            np.arange(HEADS, dtype=np.int64) * size,
            PER_NGRAM,
            EOS,
        )
        self.rows = torch.zeros(
            tokens, HEADS, store.split(store.read(np.array([0])))[0].shape[-1], dtype=torch.bfloat16
        )
        self._dice = np.random.default_rng(seed)

    def draw(self, users: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a step, where each user's begin, and what is before them."""
        drawn = self._dice.integers(0, VOCABULARY, users * tokens)
        before = self._dice.integers(0, VOCABULARY, (users, 2))
        return drawn, np.arange(users + 1) * tokens, before

    def stage(self, step: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
        """Milliseconds from tokens to activations."""
        begun = time.perf_counter()
        ids = self.hash(*step)
        rows, scales = self.fetcher.store.split(self.fetcher.fetch(ids).records())
        self.rows[: len(ids)] = dequantize(self.fetcher.store.table, rows, scales, self.rows.dtype)
        return 1e3 * (time.perf_counter() - begun)

    def close(self) -> None:
        self.fetcher.close()
