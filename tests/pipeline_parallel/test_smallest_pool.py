"""A request that is longer than what the smallest stage can hold is refused when the server starts, with the numbers.

All stages share block numbers, so the pool of each is cut to the smallest; which stage that is must not matter.
"""

from __future__ import annotations

import re

import pytest

from vllm.v1.core.kv_cache_planning import get_kv_cache_configs

from .geometry import CONTEXT, text_config
from .planner import Plan, bytes_per_block

GIB = 2**30
PARTITIONS = {"three": (3, None), "short first stage": (4, "2,16,16,14"), "one layer": (5, "1,1,14,16,16")}
CASES = [
    pytest.param(size, partition, stage, id=f"{name}, stage {stage}")
    for name, (size, partition) in PARTITIONS.items()
    for stage in range(size)
]


def blocks_of_one_request(plan: Plan) -> int:
    """Blocks that a request of the model's length takes: each group claims its own from one pool."""
    return sum(group.kv_cache_spec.max_memory_usage_pages(plan.engine) for group in plan.groups)


def planned(plan: Plan, stage: int, blocks: int) -> list[int]:
    """Blocks of each stage's pool where one stage has room for `blocks` and the others for more."""
    memory = [40 * GIB] * len(plan.stages)
    memory[stage] = blocks * bytes_per_block(plan.workers[stage])
    workers = get_kv_cache_configs(plan.engine, plan.specs, memory, plan.groups)
    return [worker.num_blocks for worker in workers]


@pytest.mark.parametrize("size, partition, stage", CASES)
def test_the_smallest_stage_decides(size, partition, stage):
    plan = Plan(text_config(), size, partition, memory=40 * GIB)
    # One block is never given to anybody.
    enough = blocks_of_one_request(plan) + 1
    assert planned(plan, stage, enough) == [enough] * size
    with pytest.raises(ValueError, match=rf"max seq len \({CONTEXT}\).*GiB KV cache is needed.*available") as refusal:
        planned(plan, stage, enough - 1)
    longest = int(re.search(r"maximum model length is (\d+)", str(refusal.value))[1])
    assert 0 < longest < CONTEXT
