"""Prompts whose greedy answers rounding does not decide."""

import random

from demo.checkpoint.tokens import SPECIAL
from demo.reference import Reference, greedy

from .checkpoints import END_OF_TEXT

#: Smallest distance between the two best logits that a prompt may have on its way.  vLLM and transformers differ by
#: about 0.03 in a logit, and by some tenths where the router or the indexer of one of them takes its second choice.
MIN_MARGIN = 0.5


def decisive(
    model, length: int, answer: int, *, seed: int, with_end_of_text: bool = False
) -> tuple[list[int], Reference]:
    """The first random prompt of `length` tokens whose `answer` greedy tokens all win by `MIN_MARGIN`.

    Equal tokens are then due, and different ones are a defect rather than bad luck.  `with_end_of_text` puts that
    token into the middle, where n-grams must not reach across it.
    """
    source = random.Random(seed)
    for _ in range(50):
        prompt = [source.randrange(len(SPECIAL), 500) for _ in range(length)]
        if with_end_of_text:
            prompt[length // 2] = END_OF_TEXT
        reference = greedy(model, prompt, answer)
        if min(reference.margins) >= MIN_MARGIN:
            return prompt, reference
    raise AssertionError(f"no decisive prompt of {length} tokens in 50 tries; see demo/checkpoint/weights.py")
