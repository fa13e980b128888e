# SPDX-License-Identifier: Apache-2.0
"""Which layers share a block table when K/V is in host memory.

Upstream groups states by the layers of the whole model. With blocks that fit one state of a
stage (``blocks.py``), a group has to hold at most one linear layer of each stage, or a block
grows to two states on that stage and every group pays for it; and as few groups as that
allows, because a request holds a block of each. So group ``k`` gets the ``k``-th linear layer
of every stage. For stages of 16 layers that is 12 groups; upstream's rule makes 18 when a
block falls 0.2 % short of a state, and puts two of one stage together for 17,16,15.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from ...stages import plan_stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def host_kv_groups(vllm_config: "VllmConfig", specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Cache groups of layers by name.

    Sparse K/V places and pooled keys form one group, rings another; states are spread as
    above, packed where a block holds several.

    Raises:
        ValueError: a spec of another kind, which this model does not have.
    """
    stage_of = stages_by_layer(vllm_config)
    widest = max_sparse_bytes(specs, stage_of)
    groups: list[KVCacheGroupSpec] = []
    for bucket in buckets(specs):
        first = specs[bucket[0]]
        if not isinstance(first, MambaSpec):
            groups.append(one_group(specs, bucket))
            continue
        per_block = max(1, widest // first.page_size_bytes)
        groups.extend(one_group(specs, names) for names in spread(bucket, stage_of, per_block))
    return groups


def stages_by_layer(vllm_config: "VllmConfig") -> dict[int, int]:
    """Decoder layer to pipeline stage."""
    config, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
    stages = plan_stages(config, parallel.pipeline_parallel_size)
    return {layer: stage.index for stage in stages for layer in stage.layers}


def buckets(specs: Mapping[str, KVCacheSpec]) -> list[list[str]]:
    """Names of layers whose specs may share a block table, in order of first appearance."""
    found: list[dict[str, KVCacheSpec]] = []
    for name, spec in specs.items():
        for bucket in found:
            if UniformTypeKVCacheSpecs.is_uniform_type({**bucket, name: spec}):
                bucket[name] = spec
                break
        else:
            found.append({name: spec})
    return [list(bucket) for bucket in found]


def max_sparse_bytes(specs: Mapping[str, KVCacheSpec], stage_of: Mapping[int, int]) -> int:
    """Bytes that a block of the sparse group takes on the stage where it takes most."""
    total: dict[int, int] = {}
    for name, spec in specs.items():
        if isinstance(spec, FullAttentionSpec):
            stage = stage_of[extract_layer_index(name)]
            total[stage] = total.get(stage, 0) + spec.page_size_bytes
    return max(total.values(), default=0)


def spread(names: Iterable[str], stage_of: Mapping[int, int], per_block: int) -> list[list[str]]:
    """Groups in which no stage has more than ``per_block`` layers, as few as that allows."""
    by_stage: dict[int, list[str]] = {}
    for name in names:
        by_stage.setdefault(stage_of[extract_layer_index(name)], []).append(name)
    count = max(-(-len(mine) // per_block) for mine in by_stage.values())
    return [[name for mine in by_stage.values() for name in mine[k::count]] for k in range(count)]


def one_group(specs: Mapping[str, KVCacheSpec], names: list[str]) -> KVCacheGroupSpec:
    inner = {name: specs[name] for name in names}
    uniform = UniformTypeKVCacheSpecs.from_specs(inner)
    if uniform is None:
        raise ValueError(f"caches of {names} cannot share a block table: {list(inner.values())}")
    return KVCacheGroupSpec(names, uniform)
