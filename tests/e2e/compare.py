"""How far an engine's log-probabilities are from transformers'."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from demo.reference import Reference

#: Bounds for prompt positions.  The floor is transformers against itself, bfloat16 against float32, on three prompts:
#: median 0.020 to 0.025, 90 % below 0.07 to 0.11, largest 0.2 to 0.55.  Two bfloat16 computations differ by about 1.4
#: times that.  The bulk is rounding (the largest logits lie between 8 and 16, where bfloat16 has steps of 0.06); the
#: largest come from positions where the router or the indexer of one side took its second choice.
TYPICAL = 0.05
NEARLY_ALL = 0.20
LARGEST = 1.0

#: Mean over the nine positions behind a cut.  Measured on intact code 0.02 to 0.10, and 0.33 to 0.87 with the PLE
#: convolution's state dropped at the cut.
AFTER_EDGE = 0.20


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
    return check_prompts([(result, expected)])


def check_prompts(pairs: Iterable[tuple[dict, torch.Tensor]]) -> Difference:
    """The same of several prompts as one, for short ones.

    Over the 22 positions of one prompt, the median of transformers against itself was 0.057 on an Intel CPU.
    """
    difference = Difference(torch.cat([prompt_difference(result, expected).values for result, expected in pairs]))
    assert difference.median <= TYPICAL, difference
    assert difference.p90 <= NEARLY_ALL, difference
    assert difference.largest <= LARGEST, difference
    return difference


def check_completion(client, model: str, prompt: list[int], expected: Reference, logprobs: int = 1):
    """Assert that a server answers token ids as transformers does; returns the completion."""
    done = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=len(expected.tokens),
        temperature=0,
        logprobs=logprobs,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = done.choices[0]
    assert choice.token_ids == expected.tokens
    assert max(abs(a - b) for a, b in zip(choice.logprobs.token_logprobs, expected.logprobs, strict=True)) <= LARGEST
    return done


def check_answer(result: dict, expected: Reference) -> float:
    """Assert equal tokens; returns the largest difference of their log-probabilities."""
    length = len(result["tokens"])
    assert result["tokens"] == expected.tokens[:length]
    pairs = zip(result["logprobs"], expected.logprobs, strict=False)
    largest = max(abs(ours - theirs) for ours, theirs in pairs)
    assert largest <= LARGEST
    return largest
