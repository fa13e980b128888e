"""What transformers' own implementation says: greedy tokens, their log-probabilities, and how close each choice was."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Reference:
    """One greedy answer.  All lists have one entry per generated token."""

    tokens: list[int]
    #: log-probability of the chosen token
    logprobs: list[float]
    #: best logit minus second best: what rounding would have to bridge to change the token
    margins: list[float]


def load(checkpoint: Path, dtype: torch.dtype = torch.bfloat16):
    """`Qwen4ExpForCausalLM` on the CPU, from the same files as the server reads."""
    from transformers import Qwen4ExpForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Its hints to install CUDA kernels for this model say nothing about a run on the CPU.
    logging.set_verbosity_error()
    # Its matrices are too small to share out: two threads on two cores mostly wait for each other.
    torch.set_num_threads(1)
    return Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()


@torch.inference_mode()
def greedy(model, prompt: list[int], length: int) -> Reference:
    """`length` greedy tokens after `prompt`, with the model's own cache; end-of-text does not stop it.

    The whole prompt is one forward and each further token one more, so this is what an engine without chunked
    prefill, paging or stages would do.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    step, cache = torch.tensor([prompt]), None
    for _ in range(length):
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits = out.logits[0, -1].float()
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(logits.log_softmax(-1)[best.indices[0]]))
        margins.append(float(best.values[0] - best.values[1]))
        step = torch.tensor([[tokens[-1]]])
    return Reference(tokens, logprobs, margins)


@torch.inference_mode()
def prompt_logprobs(model, prompt: list[int]) -> torch.Tensor:
    """[len(prompt) - 1] log-probabilities: entry i is that of `prompt[i + 1]` after `prompt[: i + 1]`."""
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    following = torch.tensor(prompt[1:])
    return logits[:-1].log_softmax(-1).gather(1, following[:, None])[:, 0]
