# SPDX-License-Identifier: Apache-2.0
"""Which pipeline stage owns which layers of Qwen4Exp, decided from the configuration alone.

Raw token ids reach every rank of the pipeline, so the n-gram table (PLE) may hang on a layer of any
stage. Several PLE layers may also sit on different stages: each has a table of its own, so spreading
them moves memory between ranks and adds none. What cannot work is refused here, before a process is
started or a weight read.

Layers are counted from zero everywhere, as in checkpoint tensor names. Only the config field
`ple_layer_ids` counts from one: [2] stands for the tensors `layers.1.ple.*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.config.switches import check_switches
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.models.qwen4_exp.compact_kv.settings import check_kv_cache
from vllm.models.qwen4_exp.drafts import check_drafts
from vllm.models.qwen4_exp.partition import (
    DeepstackBeyondFirstStage,
    MoreStagesThanLayers,
    PleLayerOutsideModel,
    StageWithoutStates,
    parse_partition,
    suggest,
)
from vllm.models.qwen4_exp.qsa.host_kv.settings import check_settings as check_kv_offload
from vllm.models.qwen4_exp.tensor_ranks import check_tensor_ranks
from vllm.v1.core.sched.pipeline_options import choose_scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds; layer numbers count from zero."""

    index: int
    layers: range
    gdn_layers: tuple[int, ...]
    qsa_layers: tuple[int, ...]
    ple_layers: tuple[int, ...]

    @property
    def has_ple(self) -> bool:
        """Whether this rank holds an n-gram table and its lookup buffers."""
        return bool(self.ple_layers)

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        span = f"layer {first}" if first == last else f"layers {first}-{last}"
        kinds = [f"{len(self.gdn_layers)} GDN", f"{len(self.qsa_layers)} QSA"]
        kinds += [f"PLE on {layer}" for layer in self.ple_layers]
        return f"stage {self.index}: {span} ({', '.join(kinds)})"


def plan_stages(
    text_config: Any,
    pipeline_size: int,
    *,
    partition: str | None = None,
    deepstack_levels: int = 0,
    prefix_caching: bool = False,
) -> tuple[Stage, ...]:
    """Assign the layers of `text_config` to `pipeline_size` stages.

    `partition` is in the form of VLLM_PP_LAYER_PARTITION ("16,16,16") and stands in for that variable
    where a caller weighs alternatives. `deepstack_levels` is the number of decoder layers, counted from
    the first, that add vision features; 0 for text. `prefix_caching` asks for linear-attention states on
    every stage: upstream's runner asserts that it finds some where it is to restore them.

    Raises:
        MoreStagesThanLayers, PleLayerOutsideModel, DeepstackBeyondFirstStage, StageWithoutStates: see each.
        PartitionNotNumbers, PartitionEntryCount, PartitionEmptyStage, PartitionSum: the partition.
    """
    num_layers = int(text_config.num_hidden_layers)
    if pipeline_size > num_layers:
        raise MoreStagesThanLayers(
            f"pipeline_parallel_size={pipeline_size} leaves stage {num_layers} and later without any of the "
            f"{num_layers} layers; {suggest(num_layers, pipeline_size, deepstack_levels)} would work"
        )
    ple_layers = _ple_layers(text_config, num_layers)
    ranges = _layer_ranges(num_layers, pipeline_size, partition, deepstack_levels)
    if pipeline_size > 1 and len(ranges[0]) < deepstack_levels:
        raise DeepstackBeyondFirstStage(
            f"stage 0 owns {len(ranges[0])} layers, and the {deepstack_levels} entries of deepstack_visual_indexes "
            f"add vision features to layers 0-{deepstack_levels - 1}, which only stage 0 receives; "
            f"{suggest(num_layers, pipeline_size, deepstack_levels)} would work"
        )
    stages = tuple(
        Stage(
            index=index,
            layers=layers,
            gdn_layers=tuple(n for n in layers if text_config.layer_types[n] == "linear_attention"),
            qsa_layers=tuple(n for n in layers if text_config.layer_types[n] != "linear_attention"),
            ple_layers=tuple(n for n in layers if n in ple_layers),
        )
        for index, layers in enumerate(ranges)
    )
    if prefix_caching and (bare := [stage for stage in stages if not stage.gdn_layers]):
        # Two neighbouring layers always include a linear one, so two per stage are enough.
        raise StageWithoutStates(
            f"{bare[0]} has no linear-attention layer, and prefix caching needs states to restore on every stage; "
            f"enable_prefix_caching=False, or {suggest(num_layers, pipeline_size, deepstack_levels, 2)} would work"
        )
    return stages


def describe(stages: tuple[Stage, ...]) -> str:
    """One line for the log, e.g. "stage 0: layers 0-15 (12 GDN, 4 QSA, PLE on 1); stage 1: …"."""
    return "; ".join(map(str, stages))


def check_stages(vllm_config: VllmConfig) -> tuple[Stage, ...]:
    """Refuse a pipeline that cannot work, log the one that was chosen, and give it its scheduler.

    Called while the configuration is built, in every process. Raises as `plan_stages`, `check_tensor_ranks`,
    `check_kv_cache`, `check_drafts` and `choose_scheduler` do, SwitchNotBoolean, and KVOffloadRefused.
    """
    model_config = vllm_config.model_config
    # Without a multimodal config the text-only class is built, which has no vision levels to keep together
    # even where the checkpoint's config describes a vision tower.
    levels = _deepstack_levels(model_config.hf_config) if model_config.multimodal_config is not None else 0
    stages = plan_stages(
        model_config.hf_text_config,
        vllm_config.parallel_config.pipeline_parallel_size,
        deepstack_levels=levels,
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
    )
    if len(stages) > 1:
        logger.info_once("Qwen4Exp pipeline: %s", describe(stages))
    check_tensor_ranks(vllm_config)
    check_kv_cache(vllm_config)
    check_drafts(vllm_config)
    choose_scheduler(vllm_config)
    check_switches(vllm_config.additional_config)
    check_kv_offload(vllm_config)
    return stages


def _layer_ranges(num_layers: int, pipeline_size: int, partition: str | None, deepstack_levels: int) -> list[range]:
    if partition is None:
        partition = envs.VLLM_PP_LAYER_PARTITION
    if partition is None:
        # Asked for, not re-implemented: the engine takes its default from this very function.
        return [range(*get_pp_indices(num_layers, rank, pipeline_size)) for rank in range(pipeline_size)]
    counts = parse_partition(partition, num_layers, pipeline_size, deepstack_levels)
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def _ple_layers(text_config: Any, num_layers: int) -> frozenset[int]:
    ids = text_config.ple_layer_ids or ()
    if outside := [one_based for one_based in ids if not 1 <= one_based <= num_layers]:
        raise PleLayerOutsideModel(
            f"ple_layer_ids={list(ids)} names layer {outside[0]}, and ids count from 1 to {num_layers}, so no stage of "
            "any partition would hold its table; take the list from the checkpoint's config.json"
        )
    return frozenset(one_based - 1 for one_based in ids)


def _deepstack_levels(hf_config: Any) -> int:
    vision_config = getattr(hf_config, "vision_config", None)
    return len(getattr(vision_config, "deepstack_visual_indexes", None) or ())
