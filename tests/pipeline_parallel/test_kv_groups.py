"""The real planner on the real model's shapes, spread over pipelines."""

from __future__ import annotations

import pytest
import torch

from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from .geometry import BLOCK, PADDED_PAGE, layer_of, qsa_specs, text_config
from .planner import Plan, bytes_per_block, tensor_layers

GIB = 2**30
# A block of a stage with n sparse layers holds their K/V and their pooled keys: 2048 + 64 B a token and layer.
SPARSE_LAYER_BLOCK = BLOCK * (2048 + 64)

PARTITIONS = {
    "three": (3, None),
    "six": (6, None),
    "short first stage": (4, "2,16,16,14"),
    "uneven": (3, "3,22,23"),
    "one layer": (5, "1,1,14,16,16"),
}


@pytest.fixture(scope="module")
def config():
    return text_config()


@pytest.fixture(params=PARTITIONS.values(), ids=PARTITIONS.keys(), scope="module")
def plan(request, config) -> Plan:
    return Plan(config, *request.param, memory=10 * GIB)


def test_groups_come_from_the_whole_model(plan):
    kinds = [type(group.kv_cache_spec.first_spec) for group in plan.groups]
    assert kinds == [MambaSpec] * 4 + [CircularBufferSpec, MLAAttentionSpec]
    # 36 GDN layers in three groups, the PLE window, 12 rings, and K/V with pooled keys of 12 layers.
    assert [len(group.layer_names) for group in plan.groups] == [12, 12, 12, 1, 12, 24]


def test_every_worker_keeps_every_group(plan):
    """Block tables are shared by number, so an emptied group has to stay in its place."""
    for stage, worker, specs in zip(plan.stages, plan.workers, plan.specs, strict=True):
        assert len(worker.kv_cache_groups) == len(plan.groups)
        for mine, whole in zip(worker.kv_cache_groups, plan.groups, strict=True):
            assert mine.layer_names == [name for name in whole.layer_names if layer_of(name) in stage.layers]
        assert sum(len(group.layer_names) for group in worker.kv_cache_groups) == len(specs)


def test_tensors_cover_exactly_the_local_layers(plan):
    for worker, specs in zip(plan.workers, plan.specs, strict=True):
        assert sorted(tensor_layers(worker)) == sorted(specs)


def test_all_workers_have_the_same_number_of_blocks(plan):
    assert len({worker.num_blocks for worker in plan.workers}) == 1


def test_bytes_per_block_follow_the_local_layers(plan):
    for stage, worker in zip(plan.stages, plan.workers, strict=True):
        states = max(sum(layer_of(n) in stage.layers for n in group.layer_names) for group in plan.groups[:3])
        assert bytes_per_block(worker) == max(states * PADDED_PAGE, len(stage.qsa_layers) * SPARSE_LAYER_BLOCK)


def test_pages_of_one_group_do_not_overlap(plan):
    for worker in plan.workers:
        stride = bytes_per_block(worker)
        for group in worker.kv_cache_groups:
            tensors = [t for t in worker.kv_cache_tensors if t.layers[0] in group.layer_names]
            pages = sorted(
                (tensor.offset + index * tensor.layer_stride, group.kv_cache_spec.kv_cache_specs[name].page_size_bytes)
                for tensor in tensors
                for index, name in enumerate(tensor.layers)
            )
            starts = [start for start, _ in pages] + [stride]
            assert all(start + size <= after for (start, size), after in zip(pages, starts[1:], strict=True))


@pytest.mark.parametrize("pipeline_size, expected", [(3, 13_246_464), (6, 6_623_232)])
def test_even_pipelines_take_equal_memory(config, pipeline_size, expected):
    plan = Plan(config, pipeline_size, None, memory=10 * GIB)
    assert {bytes_per_block(worker) for worker in plan.workers} == {expected}
    assert plan.workers[0].num_blocks == 10 * GIB // expected


def test_worker_can_allocate_what_was_planned(config):
    """The step that died: a tensor of a foreign layer belongs to none of the worker's groups."""
    plan = Plan(config, 4, "2,16,16,14", memory=10 * GIB)
    for worker, specs in zip(plan.workers, plan.specs, strict=True):
        few = get_kv_cache_config_from_groups(plan.engine, worker.kv_cache_groups, 2 * bytes_per_block(worker))
        views = allocate_kv_cache(few, torch.device("cpu"), KVCacheLayout.BLNHC)
        assert views.keys() == specs.keys()


def test_emptied_group_yields_no_tensor(config):
    """Stage 0 of 2,16,16,14 has no ring and no K/V, and two of its three GDN groups have one layer."""
    first = Plan(config, 4, "2,16,16,14", memory=10 * GIB).workers[0]
    assert [len(group.layer_names) for group in first.kv_cache_groups] == [1, 1, 0, 1, 0, 0]
    assert first.kv_cache_groups[5].kv_cache_spec.kv_cache_specs, "readers of an emptied group need its spec"
    assert [tensor.layers for tensor in first.kv_cache_tensors] == [
        ["model.layers.0.linear_attn"],
        ["model.layers.1.linear_attn"],
        ["model.layers.1.ple"],
    ]


def test_scheduler_sees_the_attention_block_size_whatever_stage_comes_first(config):
    """It copies the first worker's groups, which on a short first stage are partly empty."""
    plan = Plan(config, 4, "2,16,16,14", memory=10 * GIB)
    scheduler = generate_scheduler_kv_cache_config(plan.workers)
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups]
    assert sizes == [262_144] * 4 + [4, BLOCK]
    assert resolve_kv_cache_block_sizes(scheduler, plan.engine)[0] % BLOCK == 0


def test_hisparse_layout_skips_emptied_groups_too(config):
    from vllm.v1.hisparse.layout import _build_hisparse_kv_cache_tensors
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    spec = UniformTypeKVCacheSpecs.from_specs(
        {name: spec for name, spec in qsa_specs(config, 3).items() if isinstance(spec, MLAAttentionSpec)}
    )
    emptied = KVCacheGroupSpec([], spec)
    assert _build_hisparse_kv_cache_tensors([emptied], 2, 2 * PADDED_PAGE, KVCacheLayout.BLNHC, PADDED_PAGE) == []
