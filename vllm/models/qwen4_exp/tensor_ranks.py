# SPDX-License-Identifier: Apache-2.0
"""Into how many tensor-parallel ranks a layer can be divided, decided from the configuration alone.

Three cards are the first thing that people try, and nothing of this model comes in threes but its query heads, the only
number that upstream looks at before it starts processes. The others stop the workers one after the other, each with an
assertion or a sentence that names neither the option nor what would work. Stages divide layers and take any number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "--tensor-parallel-size"


class TensorRanksNotServed(ValueError):
    """`tensor_parallel_size` does not divide what a layer holds."""


def check_tensor_ranks(vllm_config: VllmConfig) -> None:
    """Refuse a number of tensor-parallel ranks that the workers would refuse.

    Called while the configuration is built, in every process.

    Raises:
        TensorRanksNotServed: names the option, what it does not divide, and layouts of as many cards that work.
    """
    parallel = vllm_config.parallel_config
    text = vllm_config.model_config.hf_text_config
    ranks, whole_experts = parallel.tensor_parallel_size, parallel.enable_expert_parallel
    uneven = undivided(text, ranks, whole_experts)
    if uneven:
        cards = ranks * parallel.pipeline_parallel_size
        raise TensorRanksNotServed(
            f"{OPTION} {ranks} does not divide {', '.join(uneven)} of the model's layers; for {cards} cards "
            f"{' or '.join(layouts(text, cards, whole_experts))} would work"
        )


def undivided(text: Any, ranks: int, whole_experts: bool) -> list[str]:
    """What `ranks` ranks cannot share out evenly, e.g. ["num_key_value_heads=2"].

    Args:
        text: the text config
        whole_experts: experts are given to ranks as a whole, the shared one apart
    """
    names = ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size"]
    if not whole_experts:
        names.append("moe_intermediate_size")
    found = [name for name in names if (getattr(text, name, None) or ranks) % ranks]
    # Of fewer heads than ranks each is held by as many ranks as every other.
    heads = text.num_key_value_heads
    if max(heads, ranks) % min(heads, ranks):
        found.append("num_key_value_heads")
    return [f"{name}={getattr(text, name)}" for name in found]


def layouts(text: Any, cards: int, whole_experts: bool) -> list[str]:
    """Options that use all cards, most stages first; one rank a stage always works, as far as there are layers."""
    found = []
    for ranks in range(1, cards + 1):
        stages = cards // ranks
        if cards % ranks or stages > text.num_hidden_layers or undivided(text, ranks, whole_experts):
            continue
        tensor = f"{OPTION} {ranks}" if ranks > 1 else ""
        pipeline = f"--pipeline-parallel-size {stages}" if stages > 1 or ranks == 1 else ""
        found.append(" ".join(filter(None, (tensor, pipeline))))
    return found
