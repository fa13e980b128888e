"""What the demonstration prints."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from demo.checkpoint.layout import Layout
from demo.client import MODEL, Answer
from demo.reference import Reference


@dataclass(frozen=True)
class Result:
    layout: Layout
    stages: int
    partition: str
    ready: float
    answer: Answer
    reference: Reference
    #: bytes of the server's process tree, the table on disk
    resident: int
    #: the same with the table loaded, if that was measured
    resident_with_table: int | None

    @property
    def agrees(self) -> bool:
        return self.answer.tokens == self.reference.tokens

    @property
    def first_difference(self) -> int:
        pairs = zip(self.answer.tokens, self.reference.tokens, strict=False)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(self.answer.tokens))

    @property
    def largest_logprob_difference(self) -> float:
        """Over the tokens before the first difference: after it the two answer different texts."""
        pairs = list(zip(self.answer.logprobs, self.reference.logprobs, strict=False))[: self.first_difference]
        return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


def checkpoint(path: Path, layout: Layout, how: str) -> str:
    return (
        f"checkpoint   {path}: {_mb(layout.total_bytes)} in {layout.files} files, {how}\n"
        f"             n-gram table {_mb(layout.table_bytes)} in {layout.table_shards} shards, "
        f"{layout.expert_tensors} expert tensors"
    )


def partition(log: Path) -> str:
    """The stages as the server itself logged them."""
    found = re.search(r"Qwen4Exp pipeline: (.*)", log.read_text(errors="replace"))
    return found[1].strip() if found else "one stage"


def render(result: Result) -> str:
    """The summary; every figure says whether it was measured or computed."""
    answer, reference, table = result.answer, result.reference, result.layout.table_bytes
    if result.resident_with_table is None:
        with_table = f"{_mb(result.resident + table)} with it loaded (computed: plus the table)"
    else:
        with_table = f"{_mb(result.resident_with_table)} with it loaded (measured)"
    if result.agrees:
        verdict = f"all {len(answer.tokens)} tokens agree with transformers"
    else:
        at = result.first_difference
        verdict = (
            f"DIFFERENT from token {at} on: served {answer.tokens[at : at + 4]}, "
            f"transformers {reference.tokens[at : at + 4]}"
        )
        if at < len(reference.margins):
            verdict += f" (its two best logits lie {reference.margins[at]:.2f} apart)"
    rows = [
        ("served", f"Qwen4ExpForCausalLM, bfloat16, prompt of {len(answer.prompt_tokens)} tokens"),
        ("stages", f"{result.stages}"),
        ("partition", result.partition.replace("; ", "\n             ")),
        ("ready", f"{result.ready:.1f} s after the start of vllm serve"),
        ("speed", f"{answer.decode_rate:.1f} tokens/s, first token after {answer.seconds[0]:.2f} s"),
        ("host memory", f"{_mb(result.resident)} with the table on disk (measured)"),
        ("", with_table),
        ("tokens", verdict),
        ("log-probs", f"largest difference {result.largest_logprob_difference:.3f}"),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def record(result: Result, path: Path, partition: str | None) -> None:
    """Write the figures as a measurement; the aims are what the demonstration promises on two cores."""
    from benchmarks.record import Claim, write

    answer, layout = result.answer, result.layout
    loaded = result.resident_with_table
    sample = {
        "decode_tokens_per_s": answer.decode_rate,
        "first_token_s": answer.seconds[0],
        "token_times_s": answer.seconds,
        "ready_s": result.ready,
        "tokens": len(answer.tokens),
        "tokens_equal": result.first_difference,
        "largest_logprob_difference": result.largest_logprob_difference,
        "resident_bytes": result.resident,
        "resident_with_table_bytes": result.resident + layout.table_bytes if loaded is None else loaded,
        "resident_with_table_is": "computed" if loaded is None else "measured",
    }
    settings = {
        "checkpoint": f"random, {_mb(layout.total_bytes)} of which {_mb(layout.table_bytes)} n-gram table, bfloat16",
        "stages": result.stages,
        "VLLM_PP_LAYER_PARTITION": partition,
        "partition": result.partition,
        "prompt_tokens": len(answer.prompt_tokens),
    }
    claims = [
        Claim("decode on two cores", answer.decode_rate, "tokens/s", 5.0, ">="),
        Claim("vllm serve ready", result.ready, "s", 120.0, "<="),
        Claim("tokens equal to transformers'", result.first_difference, "tokens", len(answer.tokens), ">="),
    ]
    write(path, settings, [sample], claims)


def how_to_ask(url: str) -> str:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'
    return (
        f"serving      {url}/v1, model {MODEL}; stop with Ctrl-C\n"
        f"             curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    )


def shell(command: list[str]) -> str:
    return shlex.join([Path(command[0]).name, *command[1:]])


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
