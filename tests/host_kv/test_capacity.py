"""How many tokens a KV cache holds when it keeps pooled keys only: block growth, groups, and the planner's sum."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.pipeline_parallel.geometry import GDN_PAGE, layer_of
from tests.pipeline_parallel.planner import bytes_per_block
from vllm.models.qwen4_exp.qsa.host_kv.blocks import filling_block
from vllm.models.qwen4_exp.qsa.host_kv.spec import PLACE_BYTES, HostKVSpec
from vllm.v1.kv_cache_interface import MambaSpec, compute_layer_kv_cache_shape_bytes

from .planning import HostPlan, rows

MB = 1_000_000
# At 400 MB, by the scheme that this follows (66 bytes a token and layer, upstream's groups): what has to be reached.
FOLLOWED = {3: (12_144, 1_250_832), 6: (24_288, 2_744_544)}


@pytest.mark.parametrize("stages", FOLLOWED)
def test_more_tokens_than_the_scheme_that_this_follows(stages):
    block, tokens = FOLLOWED[stages]
    plan = HostPlan(stages, 400 * MB)
    assert plan.block >= block
    assert plan.tokens >= tokens


@pytest.mark.parametrize(
    ("stages", "block", "tokens"),
    [(1, 4_176, 354_960), (2, 8_352, 860_256), (3, 12_528, 1_365_552), (4, 16_704, 1_870_848), (6, 25_056, 2_881_440)],
)
def test_capacity_at_400_mb(stages, block, tokens):
    plan = HostPlan(stages, 400 * MB)
    assert (plan.block, plan.tokens) == (block, tokens)


@pytest.mark.parametrize(("stages", "block", "tokens"), [(3, 25_056, 2_731_104), (6, 50_112, 5_762_880)])
def test_capacity_with_index_keys_of_one_byte(stages, block, tokens):
    """They are all that a token takes on the GPU: twice the block, and twice the tokens."""
    plan = HostPlan(stages, 400 * MB, index_keys="fp8")
    assert (plan.block, plan.tokens) == (block, tokens)
    for worker, stage in zip(plan.workers, plan.stages, strict=True):
        assert len(stage.qsa_layers) * (plan.block * 32 + PLACE_BYTES) <= bytes_per_block(worker) < GDN_PAGE * 1.01


@pytest.mark.parametrize("partition", ["17,16,15", "16,17,15", "18,16,14", "20,14,14"])
def test_uneven_stages_do_not_widen_a_block(partition):
    """Two states of one stage in a group would double the block of every stage."""
    plan = HostPlan(3, 400 * MB, partition)
    for worker, stage in zip(plan.workers, plan.stages, strict=True):
        sparse = len(stage.qsa_layers) * (plan.block * 64 + PLACE_BYTES)
        assert bytes_per_block(worker) == max(GDN_PAGE, sparse)
        assert max(map(bytes_per_block, plan.workers)) < GDN_PAGE * 1.01
        for group in worker.kv_cache_groups:
            states = [n for n in group.layer_names if isinstance(plan.specs[stage.index][n], MambaSpec)]
            assert len(states) <= 1


def test_groups_are_as_few_as_the_largest_stage_needs():
    plan = HostPlan(3, 400 * MB, "17,16,15")
    most = max(len(stage.gdn_layers) for stage in plan.stages)
    # With the n-gram window, the rings, and the sparse layers.
    assert len(plan.groups) == most + 3
    assert sorted(n for group in plan.groups for n in group.layer_names) == sorted(n for s in plan.specs for n in s)


def test_a_larger_block_takes_several_states():
    plan = HostPlan(6, 400 * MB)
    assert len([g for g in plan.groups if "linear_attn" in g.layer_names[0]]) == 6
    # A stage of this pipeline has 2 sparse layers; 1 or 3 of them would make blocks of half or more than one state.
    for group in plan.groups:
        by_stage = [sum(layer_of(n) in stage.layers for n in group.layer_names) for stage in plan.stages]
        assert max(by_stage) <= (4 if "self_attn" in group.layer_names[0] else 1)


@pytest.mark.parametrize(("layers", "unit"), [(1, 16), (2, 16), (4, 64), (5, 48)])
def test_a_filling_block_is_the_smallest(layers, unit):
    block = filling_block(GDN_PAGE, layers, Fraction(64), unit)
    assert block % unit == 0
    assert layers * (block * 64 + PLACE_BYTES) >= GDN_PAGE > layers * ((block - unit) * 64 + PLACE_BYTES)


def test_a_place_has_one_state_a_block():
    """Nothing per token is left on the GPU; a block's page is what the planner can lay out."""
    place = HostKVSpec(
        **{f: getattr(rows(), f) for f in ("block_size", "num_kv_heads", "head_size", "dtype")},
        row_bytes=128,
        num_head_slots=1,
        state_content_bytes=PLACE_BYTES,
        tokens_per_state=rows().block_size,
    )
    assert place.page_size_bytes == PLACE_BYTES
    assert compute_layer_kv_cache_shape_bytes(place, 5) == (5, 1, 1, PLACE_BYTES)
    assert place.host_page_bytes == rows().page_size_bytes


def test_every_worker_allocates_as_many_blocks():
    plan = HostPlan(3, 400 * MB, "17,16,15")
    assert {worker.num_blocks for worker in plan.workers} == {plan.blocks}
    # 2048 bytes a token and layer.
    for index, stage in enumerate(plan.stages):
        assert plan.host_bytes(index) == plan.blocks * plan.block * 2048 * len(stage.qsa_layers)


@pytest.mark.parametrize(
    ("ranks", "block", "tokens"), [(1, 12_528, 1_365_552), (2, 6_272, 1_467_648), (4, 3_136, 1_514_688)]
)
def test_tensor_parallel_ranks_at_400_mb(ranks, block, tokens):
    """States divide, pooled keys do not: smaller blocks, hardly more tokens, on as many times the cards.

    A head of K/V is never divided, so beyond two ranks each keeps what another has, too.
    """
    plan, alone = HostPlan(3, 400 * MB, ranks=ranks), HostPlan(3, 400 * MB)
    assert (plan.block, plan.tokens) == (block, tokens)
    assert len(plan.workers) == 3 * ranks and {worker.num_blocks for worker in plan.workers} == {plan.blocks}
    per_token = sum(plan.host_bytes(worker) for worker in range(3 * ranks)) / (plan.blocks * plan.block)
    assert per_token == 12 * 2048 * max(1, ranks // 2)
    assert sum(alone.host_bytes(worker) for worker in range(3)) / (alone.blocks * alone.block) == 12 * 2048


@pytest.mark.parametrize(("ranks", "per_token"), [(1, 1152), (2, 2 * 640), (4, 4 * 640)])
def test_int8_rows_are_whole_lines_and_change_no_block(ranks, per_token):
    """What a rank keeps of a token and layer is padded to lines of 128 bytes, so two ranks keep more than one."""
    plan, bf16 = (HostPlan(3, 400 * MB, ranks=ranks, cache_dtype=kv) for kv in ("int8_per_token_head", "auto"))
    assert (plan.block, plan.tokens) == (bf16.block, bf16.tokens)
    whole = sum(plan.host_bytes(worker) for worker in range(3 * ranks))
    assert whole == plan.blocks * plan.block * 12 * per_token


def test_host_memory_is_that_of_all_ranks():
    """8 GiB for six workers: as many tokens as for three, because each keeps half of the heads."""
    limits = dict(max_gib=8.0, context=65_536)
    one, two = HostPlan(3, 400 * MB, **limits), HostPlan(3, 400 * MB, ranks=2, **limits)
    for plan in (one, two):
        whole = sum(plan.host_bytes(worker) for worker in range(len(plan.workers)))
        assert 8 * (1 << 30) - plan.block * 12 * 2048 < whole <= 8 * (1 << 30)
    assert abs(one.blocks * one.block - two.blocks * two.block) < one.block
