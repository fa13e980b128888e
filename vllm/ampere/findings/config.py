# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.config import MULTIMODAL, present_name
from vllm.ampere.checkpoint.documents import CONFIG, GENERATION_CONFIG
from vllm.ampere.finding import WARN, Finding
from vllm.ampere.sampling import EXAMPLE, SAMPLING_KEYS, sets_sampling

#: belong to the top of a multimodal config, and to nothing else
TOP_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class KeyMisplaced(Finding):
    what = "A key of the config is at the wrong level"
    remedy = "A server reads it elsewhere and takes a default; vllm ampere check --repair OUT moves it."


class OldModelName(Finding):
    severity = WARN
    what = "The config has the model's name of its first day"
    remedy = (
        "This vLLM reads it, others do not know it any more; vllm ampere check --repair OUT writes the present one. Such "
        "checkpoints may lack the tokenizer's reasoning tokens too: take the tokenizer files of the release."
    )


class OutputGateUnsaid(Finding):
    severity = WARN
    what = "The config does not say how linear attention gates its output"
    remedy = 'The published model has "output_gate_type": "sigmoid"; without the key a server takes silu.'


class SamplingUnsaid(Finding):
    severity = WARN
    what = "The generation config sets no sampling parameters"
    remedy = (
        "Requests that set none are sampled from the whole vocabulary at temperature 1. Add the values of the model's "
        f"card, as in: {EXAMPLE}"
    )


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Placement first: the other two look at where a server would look."""
    config = checkpoint.config
    text = config.get("text_config")
    for key in checkpoint.text.misplaced:
        inside = "no such key there" if key not in text else f"{text[key]!r} there"
        yield KeyMisplaced(f"{CONFIG}, {key}", "the key in text_config", f"{config[key]!r} at the top and {inside}")
    for key in TOP_KEYS:
        if isinstance(text, dict) and key in text and key not in config:
            yield KeyMisplaced(f"{CONFIG}, text_config.{key}", "the key at the top", "the key in text_config only")
    for level in ("", "text_config.", "vision_config."):
        holder = config.get(level[:-1]) if level else config
        for key in ("model_type", "architectures"):
            for name in _listed((holder or {}).get(key)):
                if name and present_name(name) != name:
                    yield OldModelName(f"{CONFIG}, {level}{key}", present_name(name), name)
    if "output_gate_type" not in (text or {}) and "output_gate_type" not in config:
        place = CONFIG if text is None else f"{CONFIG}, text_config"
        yield OutputGateUnsaid(f"{place}, output_gate_type", "sigmoid or silu", f"no such key ({MULTIMODAL})")
    generation = checkpoint.generation_config
    if not sets_sampling(generation):
        found = "no such file" if generation is None else f"{', '.join(sorted(generation)) or 'nothing'}"
        yield SamplingUnsaid(GENERATION_CONFIG, f"one of {', '.join(SAMPLING_KEYS[:6])}", found)


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]
