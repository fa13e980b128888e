# SPDX-License-Identifier: Apache-2.0
"""Options of the pipeline scheduler: the keys of `--additional-config '{"pipeline_scheduler": {...}}'`.

Whatever upstream has an option for keeps its name and place in SchedulerConfig and means the same here: `policy`,
`max_num_batched_tokens`, `max_num_seqs`, `max_num_active_seqs`, `long_prefill_token_threshold`,
`prefill_schedule_interval`.  Only what upstream has no word for is listed below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

#: The key below `--additional-config`.
KEY = "pipeline_scheduler"
#: The value of `min_decode_batch` that leaves the choice to measured times.
MEASURED = "measured"
SCHEDULER = "vllm.v1.core.sched.pipeline.PipelineScheduler"


class PipelineOptionsNotMapping(ValueError):
    """`pipeline_scheduler` is not an object of options."""


class UnknownPipelineOption(ValueError):
    """A key that no option has."""


class PipelineOptionOutOfRange(ValueError):
    """A value of the wrong kind or outside its range."""


class PipelineOptionsUnused(ValueError):
    """Options of a scheduler that is not the chosen one."""


@dataclass(frozen=True)
class PipelineOptions:
    """Validated when built, so that every holder has values that work.

    Raises:
        PipelineOptionOutOfRange: by name, value and range.
    """

    #: Decoding requests that a micro-batch must hold before another one is used: 4 users on 3 stages are 2+1+1 with
    #: 1, 2+2 with 2 and one batch with 4.  "measured" times rounds and keeps the fastest arrangement: more micro-batches
    #: keep more stages busy, and each costs the host its time.
    #: Unset, it is "measured" on GPUs; on a CPU, where stages share cores and more micro-batches are more work for the
    #: same cores (measured: docs/ampere-multigpu/benches/pipeline-cpu-scheduler.json), all decode in one.
    min_decode_batch: int | Literal["measured"] | None = None
    #: Part of a micro-batch's prefill tokens that the prompt first in line keeps while much shorter ones wait; the
    #: others get the rest, the shortest first.  1 is first come, first served whatever the lengths.
    long_prefill_share: float = 0.5

    def __post_init__(self) -> None:
        batch, share = self.min_decode_batch, self.long_prefill_share
        counted = isinstance(batch, int) and not isinstance(batch, bool) and batch >= 1
        if batch is not None and batch != MEASURED and not counted:
            raise PipelineOptionOutOfRange(
                f'{KEY}.min_decode_batch={batch!r}, expected a whole number of 1 or more, or "{MEASURED}"'
            )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise PipelineOptionOutOfRange(
                f"{KEY}.long_prefill_share={share!r}, expected a number above 0 and up to 1 (1 leaves nothing to others)"
            )


def parse(additional_config: Any) -> PipelineOptions:
    """Options from a VllmConfig's `additional_config`; the defaults where it says nothing about them.

    Raises:
        PipelineOptionsNotMapping, UnknownPipelineOption, PipelineOptionOutOfRange: see each.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise PipelineOptionsNotMapping(
            f'additional_config[{KEY!r}] is {given!r}, expected an object such as {{"min_decode_batch": 2}}'
        )
    known = [field.name for field in fields(PipelineOptions)]
    if unknown := sorted(set(given) - set(known)):
        raise UnknownPipelineOption(f"additional_config[{KEY!r}] has {unknown}, known are {known}")
    return PipelineOptions(**given)


def choose_scheduler(vllm_config: VllmConfig) -> None:
    """Take the pipeline scheduler where there are stages and `--scheduler-cls` names none, and check its options.

    Called while the configuration is built, so that a wrong option ends the start before a process begins.

    Raises:
        PipelineOptionsUnused: there are options, and the scheduler is another one.
        PipelineOptionsNotMapping, UnknownPipelineOption, PipelineOptionOutOfRange: see each.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    config = vllm_config.scheduler_config
    options = parse(vllm_config.additional_config)
    if config.scheduler_cls is None and stages > 1:
        config.scheduler_cls = SCHEDULER
        logger.info_once(
            "Micro-batches of %d stages are filled by the pipeline scheduler (%s). For upstream's scheduler: "
            "--scheduler-cls vllm.v1.core.sched.scheduler.Scheduler, with async scheduling "
            "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
            stages,
            options,
        )
    given = isinstance(vllm_config.additional_config, Mapping) and KEY in vllm_config.additional_config
    if given and not _is_ours(config.scheduler_cls and config.get_scheduler_cls()):
        raise PipelineOptionsUnused(
            f"additional_config has {KEY!r}, and the scheduler is {config.scheduler_cls or 'the default for one stage'}, "
            f"which does not read it; remove it or pass --scheduler-cls {SCHEDULER}"
        )


def _is_ours(scheduler: type | None) -> bool:
    # Imported here: the scheduler's modules import the configuration that is being built.
    from vllm.v1.core.sched.pipeline import PipelineScheduler

    return scheduler is not None and issubclass(scheduler, PipelineScheduler)
