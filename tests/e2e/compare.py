"""How far an engine's log-probabilities are from transformers'."""

from dataclasses import dataclass

import torch

from demo.reference import Reference

#: Bounds for prompt positions, from what was seen on PP=1, 2 and 3 (see the figures that a run of these tests prints).
#: The bulk differs by bfloat16 rounding alone; the largest logits lie between 8 and 16, where bfloat16 has steps of
#: 0.06, and enter every log-probability.  A few positions differ more: there the router or the indexer of one
#: side took its second choice, which is the model's own discontinuity.
TYPICAL = 0.05
NEARLY_ALL = 0.15
LARGEST = 1.0

#: A state lost at a chunk edge spoils the positions behind the edge, about nine of them, by 0.5 and more.
AFTER_EDGE = 0.15


@dataclass(frozen=True)
class Difference:
    """Absolute differences of the prompt's log-probabilities, one entry per prompt token after the first."""

    values: torch.Tensor

    @property
    def median(self) -> float:
        return float(self.values.median())

    @property
    def p90(self) -> float:
        return float(self.values.quantile(0.9))

    @property
    def largest(self) -> float:
        return float(self.values.max())

    def after(self, cut: int, width: int = 9) -> float:
        """Mean over the `width` positions whose logits come from the first tokens of the chunk that starts at `cut`."""
        return float(self.values[cut : cut + width].mean())

    def __str__(self) -> str:
        return f"median {self.median:.3f}, 90 % {self.p90:.3f}, largest {self.largest:.3f}"


def prompt_difference(result: dict, expected: torch.Tensor) -> Difference:
    return Difference((torch.tensor(result["prompt_logprobs"]) - expected).abs())


def check_prompt(result: dict, expected: torch.Tensor) -> Difference:
    """Assert that a prompt's log-probabilities are transformers' within the bounds above."""
    difference = prompt_difference(result, expected)
    assert difference.median <= TYPICAL, difference
    assert difference.p90 <= NEARLY_ALL, difference
    assert difference.largest <= LARGEST, difference
    return difference


def check_answer(result: dict, expected: Reference) -> float:
    """Assert equal tokens; returns the largest difference of their log-probabilities."""
    length = len(result["tokens"])
    assert result["tokens"] == expected.tokens[:length]
    pairs = zip(result["logprobs"], expected.logprobs, strict=False)
    largest = max(abs(ours - theirs) for ours, theirs in pairs)
    assert largest <= LARGEST
    return largest
