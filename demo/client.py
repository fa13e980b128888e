"""One streamed chat completion through the `openai` client, with what vLLM adds to it: token ids."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

MODEL = "qwen4-exp-demo"


@dataclass
class Answer:
    """`tokens`, `logprobs` and `seconds` (since the request was sent) have one entry per generated token."""

    prompt_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, whose time is the prompt's."""
        return (len(self.tokens) - 1) / (self.seconds[-1] - self.seconds[0])


def stream_chat(url: str, prompt: str, length: int, on_text: Callable[[str], None] = lambda text: None) -> Answer:
    """`length` greedy tokens in answer to `prompt`; `on_text` gets the text as it arrives.

    `return_token_ids` is vLLM's own field: text alone would not show two tokens that spell alike, and bytes that are
    not yet a character have no text at all.
    """
    from openai import OpenAI

    answer = Answer()
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=length,
        temperature=0,
        logprobs=True,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    for chunk in stream:
        now = time.perf_counter() - start
        if ids := getattr(chunk, "prompt_token_ids", None):
            answer.prompt_tokens = ids
        for choice in chunk.choices:
            new = getattr(choice, "token_ids", None) or []
            answer.tokens += new
            answer.seconds += [now] * len(new)
            if choice.logprobs and choice.logprobs.content:
                answer.logprobs += [entry.logprob for entry in choice.logprobs.content]
            if choice.delta.content:
                answer.text += choice.delta.content
                on_text(choice.delta.content)
    return answer
