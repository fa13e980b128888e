# SPDX-License-Identifier: Apache-2.0
"""VLLM_PP_LAYER_PARTITION: reading it, refusing what cannot work, and proposing one that does.

Upstream reads the variable late, in each worker, and checks only the number of entries and their sum: a
stage of zero or of minus one layers passes. Here each way to be wrong has an error of its own, and every
message ends in settings that work for the model at hand.
"""

from __future__ import annotations

VARIABLE = "VLLM_PP_LAYER_PARTITION"

# The widest pipeline that we propose when the requested one is impossible: the cards of one host. A longer
# list of layer counts would not help whoever reads the message.
_WIDEST_PROPOSAL = 8


class PipelineStageError(ValueError):
    """The model's layers cannot be spread over the pipeline as configured."""


class MoreStagesThanLayers(PipelineStageError):
    """Some stage would own no layer."""


class PleLayerOutsideModel(PipelineStageError):
    """`ple_layer_ids` counts from one and names a layer that the model does not have."""


class DeepstackBeyondFirstStage(PipelineStageError):
    """Vision features are added to the first layers, and only the first stage receives them."""


class StageWithoutStates(PipelineStageError):
    """Prefix caching keeps linear-attention states on every stage, and one stage has no such layer."""


class PartitionNotNumbers(PipelineStageError):
    """An entry of the partition is empty or not a whole number."""


class PartitionEntryCount(PipelineStageError):
    """The partition does not have one entry per stage."""


class PartitionEmptyStage(PipelineStageError):
    """An entry of the partition is zero or negative."""


class PartitionSum(PipelineStageError):
    """The entries do not add up to the model's layers."""


def parse_partition(partition: str, num_layers: int, pipeline_size: int, first_at_least: int = 0) -> list[int]:
    """Layers per stage, `pipeline_size` positive numbers whose sum is `num_layers`.

    `first_at_least` only shapes the proposal in a message; it is not checked.

    Raises:
        PartitionNotNumbers, PartitionEntryCount, PartitionEmptyStage, PartitionSum: in this order, so that a
            message is about the first thing to repair.
    """
    setting = f"{VARIABLE}={partition!r}"
    way_out = f"{suggest(num_layers, pipeline_size, first_at_least)} would work"
    counts: list[int] = []
    for stage, entry in enumerate(partition.split(",")):
        try:
            counts.append(int(entry))
        except ValueError:
            raise PartitionNotNumbers(
                f"{setting} has {entry!r} for stage {stage}, expected a whole number of layers; {way_out}"
            ) from None
    if len(counts) != pipeline_size:
        raise PartitionEntryCount(
            f"{setting} has {len(counts)} entries for pipeline_parallel_size={pipeline_size}, so stage "
            f"{min(len(counts), pipeline_size)} exists on one side only; {way_out}"
        )
    for stage, count in enumerate(counts):
        if count < 1:
            raise PartitionEmptyStage(
                f"{setting} gives {count} layers to stage {stage}, and every stage needs at least one; {way_out}"
            )
    if (total := sum(counts)) != num_layers:
        odd = f"leaves layer {total} without a stage" if total < num_layers else f"gives layer {num_layers} to a stage"
        raise PartitionSum(f"{setting} adds up to {total} and {odd}, and the model has {num_layers} layers; {way_out}")
    return counts


def suggest(num_layers: int, pipeline_size: int, first_at_least: int = 0, each_at_least: int = 1) -> str:
    """Settings that work for this model, closest to what was asked for."""
    first_at_least = max(first_at_least, each_at_least)
    widest = (num_layers - first_at_least) // each_at_least + 1
    size = pipeline_size if pipeline_size <= widest else min(_WIDEST_PROPOSAL, widest)
    counts = ",".join(map(str, propose(num_layers, size, first_at_least)))
    smaller = f"pipeline_parallel_size={size} with " if size != pipeline_size else ""
    return f"{smaller}{VARIABLE}={counts}"


def propose(num_layers: int, pipeline_size: int, first_at_least: int = 1) -> list[int]:
    """Even layer counts whose first entry is at least `first_at_least`; needs room for one layer per stage.

    Layers left over go to the stages after the first, which also holds the embedding.
    """
    base, extra = divmod(num_layers, pipeline_size)
    if pipeline_size > 1 and base < first_at_least:
        return [first_at_least, *propose(num_layers - first_at_least, pipeline_size - 1)]
    return [base + (1 <= stage <= extra) for stage in range(pipeline_size)]
