# SPDX-License-Identifier: Apache-2.0
"""Row numbers of a step's tokens, on the host.

The hash of upstream's layer (`compute_ngram_ids`), without a device and without a matrix of requests by tokens: every
request's tokens stand behind the ``ngram_size - 1`` that come before them, and an n-gram that would reach over an end of
text, or over the beginning of a request, sees ends of text there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class NgramHash:
    """The numbers that a layer hashes with.

    Attributes:
        multipliers: int64 ``[ngram_size]``, by distance from the token itself
        sizes, offsets: int64 ``[heads]``, each head's rows and where they begin; heads of pairs first, then of threes…
        heads_per_ngram: heads for each length of n-gram
        eos: the token that ends a text
    """

    multipliers: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    heads_per_ngram: int
    eos: int

    @classmethod
    def of(cls, layer: Any) -> "NgramHash":
        """The numbers of upstream's ``Qwen4ExpNGramEmbedding``, which are loaded with the weights."""
        return cls(
            layer.layer_multipliers.cpu().numpy().copy(),
            layer.ngram_heads_vocab_sizes.cpu().numpy().copy(),
            layer.ngram_heads_offsets.cpu().numpy().copy(),
            int(layer.heads_per_ngram),
            int(layer.eos_token_id),
        )

    @property
    def reach(self) -> int:
        """Tokens before a token that its n-grams see."""
        return len(self.multipliers) - 1

    def __call__(self, tokens: np.ndarray, starts: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Hash a packed step.

        Args:
            tokens: integers ``[tokens]``, request after request
            starts: integers ``[requests + 1]``, where each request's tokens begin, closed by their number
            before: integers ``[requests, reach]``, the tokens before each request's first one, ends of text where
                there are none

        Returns:
            int64 ``[tokens, heads]``
        """
        earlier = self._earlier(tokens, starts, before)
        ended = np.logical_or.accumulate(earlier == self.eos, axis=1)
        mixed = np.where(ended, self.eos, earlier) * self.multipliers[1:]
        mixed[:, 0] ^= tokens * self.multipliers[0]
        mixed = np.bitwise_xor.accumulate(mixed, axis=1)
        return np.repeat(mixed, self.heads_per_ngram, axis=1) % self.sizes + self.offsets

    def _earlier(self, tokens: np.ndarray, starts: np.ndarray, before: np.ndarray) -> np.ndarray:
        """int64 ``[tokens, reach]``: what is before each token, the nearest first."""
        lengths = np.diff(starts)
        if (lengths == 1).all():
            # A step that only decodes.
            return before[:, ::-1].astype(np.int64)
        # Requests one after the other, each behind what comes before it.
        at = np.arange(len(tokens)) + self.reach * np.repeat(np.arange(1, len(lengths) + 1), lengths)
        line = np.empty(len(tokens) + self.reach * len(lengths), dtype=np.int64)
        line[at] = tokens
        head = (np.asarray(starts[:-1]) + self.reach * np.arange(len(lengths)))[:, None] + np.arange(self.reach)
        line[head] = before
        return line[at[:, None] - np.arange(1, self.reach + 1)]
