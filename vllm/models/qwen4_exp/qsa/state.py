# SPDX-License-Identifier: Apache-2.0
"""What a row has seen of its columns: enough to add more of them, in any number of parts."""

from typing import NamedTuple

import torch

# The maximum of no scores. Not -inf, whose difference to itself is NaN.
NOTHING = -1.0e30


class State(NamedTuple):
    """Unnormalised attention of rows, float32.

    ``p = 2^(score - maximum)``, scores in units of log2: with ``s = q.k / sqrt(dim)``
    the score is ``s * log2(e)``.  ``maximum`` is near the largest, so that no sum overflows:
    kernels round it up, and move it by the exponent of int8 values' scales (``softmax.py``).
    Of fp8 rows the accumulator lacks the layer's one ``v_scale``, which ``finish`` takes;
    scales of int8 rows are in it.

    Attributes:
        accumulator: ``[rows, heads, dim]``, the sum of ``p * value``.
        maximum: ``[rows, heads]``, what scores are relative to.
        normaliser: ``[rows, heads]``, the sum of ``p``.

    """

    accumulator: torch.Tensor
    maximum: torch.Tensor
    normaliser: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int, device: torch.device | str) -> "State":
        """The state of ``rows`` that have seen nothing."""
        like = {"dtype": torch.float32, "device": device}
        return cls(torch.empty(rows, heads, dim, **like), *(torch.empty(rows, heads, **like) for _ in "mn")).clear()

    def clear(self) -> "State":
        """Forget all columns, in place."""
        self.accumulator.zero_()
        self.maximum.fill_(NOTHING)
        self.normaliser.zero_()
        return self

    def rows(self, part: slice) -> "State":
        """The same state of some of the rows; memory is shared."""
        return State(*(tensor[part] for tensor in self))
