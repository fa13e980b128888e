"""With K/V in host memory greedy tokens stay transformers': sections, preemption, prefix hits, bf16 and int8.

The checkpoint is small, but what the option does happens: blocks grow from 128 tokens to several hundred, the pooled
keys of a stage fill them, and arenas are overflowed by every prompt or by none.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from .compare import check_answer
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

ANSWER = 12
#: A key and a value of 2 heads of 128 numbers: bytes of a token in bf16, as its stage keeps them.
ROW = 1024


@dataclass(frozen=True)
class Engine:
    stages: int
    partition: str | None
    chunk: int
    arena: int
    block: int
    prefix_caching: bool
    arguments: dict[str, Any] = field(default_factory=dict)


ENGINES = {
    # Sections of 32 rows, half the indexer's budget; two sparse layers on one stage, one on the other; too few blocks
    # for two requests that both grow into a second block.
    "bf16, small arena": Engine(2, "6,6", 100, 64 * ROW + 512, 272, True, {"num_gpu_blocks_override": 23}),
    # Everything in one section; with bf16 index keys a block has 544 tokens.
    "int8, large arena": Engine(
        3, None, 512, 4096 * ROW, 1072, False,
        {"kv_cache_dtype": "int8_per_token_head", "attention_config": {"indexer_kv_dtype": "fp8"}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=ENGINES)
def engine(request) -> Engine:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def requests(references):
    """Prompts with their references: far above budget and arena, two that end just before a block does, and below."""
    model = references("ple-early")
    return [decisive(model, length, ANSWER, seed=seed) for length, seed in ((1333, 11), (264, 12), (266, 13), (40, 14))]


ALONE, AGAIN, PACKED, GROWING = range(4)


@pytest.fixture(scope="module")
def outcome(engine, requests, run_job):
    asked = [{"prompt": prompt, "length": ANSWER} for prompt, _ in requests]
    result = run_job(
        "ple-early",
        [asked[:1], asked[:1], asked, asked[1:3]],
        partition=engine.partition,
        pipeline_parallel_size=engine.stages,
        max_num_batched_tokens=engine.chunk,
        enable_prefix_caching=engine.prefix_caching,
        max_model_len=1536,
        qsa_config={"kv_offload": True, "arena_bytes": engine.arena},
        **engine.arguments,
    )
    assert result["block_size"] == engine.block
    return result["batches"]


@pytest.mark.parametrize("batch", [ALONE, AGAIN, PACKED, GROWING])
def test_tokens_are_transformers(outcome, engine, requests, figures, batch):
    expected = {ALONE: requests[:1], PACKED: requests, GROWING: requests[1:3], AGAIN: requests[:1]}[batch]
    largest = max(check_answer(result, one) for result, (_, one) in zip(outcome[batch], expected, strict=True))
    figures(f"K/V in host memory, {engine.arguments.get('kv_cache_dtype', 'bf16')}", largest, "")


def test_a_request_was_preempted_and_resumed(outcome, engine):
    """Its tokens are computed again from the start, so it is scheduled for more than it has; not with blocks for all."""
    again = [sum(result["chunks"]) - (length + ANSWER - 1) for result, length in zip(outcome[GROWING], (264, 266))]
    assert (max(again) > 0) == ("num_gpu_blocks_override" in engine.arguments)


def test_a_prefix_hit_reads_rows_that_another_request_wrote(outcome, engine):
    (result,) = outcome[AGAIN]
    assert result["cached"] == (4 * engine.block if engine.prefix_caching else 0)


def test_tensor_parallel_ranks_keep_their_own_heads(references, run_job, figures):
    """Two ranks of one stage, each with a K/V head: chunks over sections, beside a request that decodes by then."""
    model = references("two-ranks")
    requests = [decisive(model, length, ANSWER, seed=seed) for length, seed in ((333, 21), (40, 22))]
    asked = [{"prompt": prompt, "length": ANSWER} for prompt, _ in requests]
    result = run_job(
        "two-ranks",
        [asked[1:] + asked[:1]],
        tensor_parallel_size=2,
        max_num_batched_tokens=100,
        # Half of what a token takes, and a seventh of the long prompt: sections on each rank by itself.
        qsa_config={"kv_offload": True, "arena_bytes": 96 * ROW // 2 + 512},
        # Ranks that wait for each other keep two cores busy; where more runs beside them, a turn may be long.
        watchdog_config={"silence_limit": 200},
    )
    short, long = result["batches"][0]
    assert long["chunks"][:3] == [60, 99, 99], "the short one decodes in steps with chunks of the long one"
    largest = max(check_answer(found, expected) for found, (_, expected) in zip((long, short), requests, strict=True))
    figures("K/V in host memory, two tensor-parallel ranks", largest, "")
