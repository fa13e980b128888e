"""The smallest memory decides how many blocks there are, and too little of one is refused with both tables."""

from __future__ import annotations

import pytest

from vllm.models.qwen4_exp.qsa.host_kv.budget import Need, Worker
from vllm.models.qwen4_exp.qsa.host_kv.errors import HostKVDoesNotFit

from .planning import GIB, HostPlan

MB = 1_000_000


def test_gpus_decide_where_host_memory_is_ample():
    assert HostPlan(3, 400 * MB, host=200 * GIB).blocks == HostPlan(3, 400 * MB).blocks


@pytest.mark.parametrize("partition", [None, "17,16,15", "20,14,14"])
def test_the_users_limit_covers_all_stages(partition):
    plan = HostPlan(3, 400 * MB, partition, max_gib=24)
    total = sum(plan.host_bytes(index) for index in range(3))
    one_more = total // plan.blocks
    assert total <= 24 * GIB < total + one_more
    assert plan.blocks < HostPlan(3, 400 * MB, partition).blocks


def test_free_memory_limits_too():
    assert HostPlan(3, 400 * MB, host=24 * GIB).blocks == HostPlan(3, 400 * MB, max_gib=24).blocks
    assert HostPlan(3, 400 * MB, host=24 * GIB, max_gib=30).blocks == HostPlan(3, 400 * MB, max_gib=24).blocks


def test_too_little_host_memory_is_refused_with_what_is_missing():
    with pytest.raises(HostKVDoesNotFit) as caught:
        HostPlan(3, 400 * MB, host=8 * GIB)
    text = str(caught.value)
    # 21 blocks of tokens, 12 of states, one each of the window and the rings, and the null block: 36 of 0.287 GiB.
    assert "One request of 262144 tokens takes 36 blocks of 12528 tokens" in text
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("host memory")]
    assert line.split() == "host memory, all stages 10.32 GiB 8.00 GiB too small free host memory".split()
    assert "kv_offload_max_gib" in text and "int8_per_token_head" in text


def test_too_little_gpu_memory_is_refused_with_its_rank():
    with pytest.raises(HostKVDoesNotFit) as caught:
        HostPlan(3, 100 * MB)
    lines = [line for line in str(caught.value).splitlines() if "too small" in line]
    assert [line.split()[:5] for line in lines] == [["KV", "cache", "of", "rank", str(rank)] for rank in range(3)]
    assert "--kv-cache-memory" in str(caught.value)


def test_a_shorter_context_fits():
    plan = HostPlan(3, 100 * MB, context=4096)
    assert plan.blocks == 31


def test_the_limit_is_the_lesser_of_both():
    need = Need((Worker(10, 100, 1000), Worker(10, 50, 700)), 16, 5, 64, 3000, "free host memory")
    assert (need.host_block, need.host_blocks, need.blocks) == (150, 20, 20)
    need = Need((Worker(10, 100, 1000), Worker(10, 50, 150)), 16, 5, 64, 3000, "free host memory")
    assert need.blocks == 15
