# SPDX-License-Identifier: Apache-2.0
"""The same KV block sizes on every pipeline stage.

Upstream derives block sizes in each worker from the attention layers of that worker. A stage that holds only
linear-attention layers finds none and keeps the defaults: its states stay unpadded, and with prefix caching they
are kept every 16 tokens where the other stages keep them every 1568. The planner then makes extra groups, and the
scheduler, which takes the smallest block for the block, ends prefill chunks where the other stages have no block
boundary. Nothing reconciles this later: the engine core sees the cache specs only after they were built from
those sizes.

The sizes are exchanged, not recomputed from the model's config, because they depend on the backends that the
layers of the other stages chose (dtype, kernel alignment, a platform's own rounding), which only those know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig

logger = init_logger(__name__)


class StagesDisagreeOnBlockSizes(ValueError):
    """Stages that do hold attention layers came to different sizes, so none can be preferred."""


@dataclass(frozen=True)
class BlockSizes:
    """The fields of CacheConfig that block alignment sets; tokens, tokens, bytes, bytes."""

    block_size: int
    mamba_block_size: int | None
    mamba_page_size_padded: int | None
    skip_page_size_padded: int | None

    @classmethod
    def of(cls, cache_config: CacheConfig) -> BlockSizes:
        return cls(**{name: getattr(cache_config, name) for name in cls.__dataclass_fields__})

    def adopt(self, cache_config: CacheConfig) -> None:
        for name, value in asdict(self).items():
            setattr(cache_config, name, value)


@dataclass(frozen=True)
class StageReport:
    """What one stage arrived at, and whether it had attention layers to derive it from."""

    has_attention: bool
    sizes: BlockSizes


def update_block_sizes_on_all_stages(vllm_config: VllmConfig) -> None:
    """Align block sizes in this worker, then with the other stages. Called by every rank after loading.

    Raises:
        StagesDisagreeOnBlockSizes: on every rank alike, so that none waits for another.
    """
    current_platform.update_block_size_for_backend(vllm_config)
    if vllm_config.parallel_config.pipeline_parallel_size == 1 or vllm_config.model_config is None:
        return
    group = get_pp_group()
    reports: list[StageReport | None] = [None] * group.world_size
    torch.distributed.all_gather_object(reports, report(vllm_config), group=group.cpu_group)
    agreed = agree(reports)
    if agreed != BlockSizes.of(vllm_config.cache_config):
        logger.info("This stage has no attention layers and takes its block sizes from those that do: %s", agreed)
        agreed.adopt(vllm_config.cache_config)


def report(vllm_config: VllmConfig) -> StageReport:
    """This worker's sizes, after the platform aligned them."""
    # The test that the platform itself made: without such a backend it returned before aligning anything.
    has_attention = bool(current_platform._find_non_ssm_backends(vllm_config))
    return StageReport(has_attention, BlockSizes.of(vllm_config.cache_config))


def agree(reports: Sequence[StageReport]) -> BlockSizes:
    """The sizes of the stages that hold attention layers; the first stage's if none does.

    Raises:
        StagesDisagreeOnBlockSizes: two stages with attention layers report different sizes.
    """
    informed = {stage: r.sizes for stage, r in enumerate(reports) if r.has_attention}
    if len(set(informed.values())) > 1:
        listing = ", ".join(f"stage {stage}: {sizes}" for stage, sizes in informed.items())
        raise StagesDisagreeOnBlockSizes(
            f"pipeline stages derive different KV block sizes from their layers ({listing}); set --block-size to a "
            "common multiple, or give each stage the same kinds of layers with VLLM_PP_LAYER_PARTITION"
        )
    return next(iter(informed.values()), reports[0].sizes)
