"""Every refusal: its own error, and a message with setting, value, place and a way out that works."""

from __future__ import annotations

import re

import pytest

from vllm.models.qwen4_exp import partition as errors
from vllm.models.qwen4_exp.partition import PipelineStageError, propose, suggest
from vllm.models.qwen4_exp.stages import plan_stages

from .geometry import text_config

PROPOSAL = r"(?:pipeline_parallel_size=(\d+) with )?VLLM_PP_LAYER_PARTITION=([\d,]+) would work$"

REFUSALS = [
    # pipeline size, partition, deepstack levels, error, what the message must name
    (3, "16,16", 0, errors.PartitionEntryCount, ["'16,16'", "2 entries", "size=3", "stage 2"]),
    (2, "16,16,16", 0, errors.PartitionEntryCount, ["3 entries", "size=2", "stage 2"]),
    (3, "16,16,15", 0, errors.PartitionSum, ["'16,16,15'", "up to 47", "48 layers", "layer 47 without"]),
    (3, "16,16,17", 0, errors.PartitionSum, ["up to 49", "48 layers", "layer 48 to a stage"]),
    (3, "16,x,16", 0, errors.PartitionNotNumbers, ["'16,x,16'", "'x'", "stage 1"]),
    (3, "16,,16", 0, errors.PartitionNotNumbers, ["'16,,16'", "''", "stage 1"]),
    (3, "16,16,16,", 0, errors.PartitionNotNumbers, ["''", "stage 3"]),
    (3, "", 0, errors.PartitionNotNumbers, ["''", "stage 0"]),
    (3, "16,16.0,16", 0, errors.PartitionNotNumbers, ["'16.0'", "stage 1"]),
    (3, "0,24,24", 0, errors.PartitionEmptyStage, ["0 layers", "stage 0"]),
    (3, "24,25,-1", 0, errors.PartitionEmptyStage, ["-1 layers", "stage 2"]),
    (49, None, 0, errors.MoreStagesThanLayers, ["pipeline_parallel_size=49", "stage 48", "48 layers"]),
    (3, "2,23,23", 3, errors.DeepstackBeyondFirstStage, ["stage 0 owns 2", "layers 0-2", "deepstack_visual_indexes"]),
    (24, None, 3, errors.DeepstackBeyondFirstStage, ["stage 0 owns 2", "layers 0-2"]),
    (48, None, 3, errors.DeepstackBeyondFirstStage, ["stage 0 owns 1"]),
]


@pytest.fixture(autouse=True)
def no_partition(monkeypatch):
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


@pytest.mark.parametrize("size, partition, levels, error, named", REFUSALS)
def test_refusal(size, partition, levels, error, named):
    with pytest.raises(error) as refusal:
        plan_stages(text_config(), size, partition=partition, deepstack_levels=levels)
    assert type(refusal.value) is error
    message = str(refusal.value)
    assert [text for text in named if text not in message] == []


@pytest.mark.parametrize("size, partition, levels, error, named", REFUSALS)
def test_proposal_in_the_message_is_accepted(size, partition, levels, error, named):
    with pytest.raises(error) as refusal:
        plan_stages(text_config(), size, partition=partition, deepstack_levels=levels)
    found = re.search(PROPOSAL, str(refusal.value))
    assert found, refusal.value
    proposed = int(found[1] or size)
    assert len(plan_stages(text_config(), proposed, partition=found[2], deepstack_levels=levels)) == proposed


@pytest.mark.parametrize("size, partition", [(3, "3,1,44"), (5, "14,1,1,16,16"), (48, None), (30, None)])
def test_stage_without_states_under_prefix_caching(size, partition):
    with pytest.raises(errors.StageWithoutStates) as refusal:
        plan_stages(text_config(), size, partition=partition, prefix_caching=True)
    message = str(refusal.value)
    assert "1 QSA)" in message and "enable_prefix_caching=False" in message
    found = re.search(PROPOSAL, message)
    plan_stages(text_config(), int(found[1] or size), partition=found[2], prefix_caching=True)


@pytest.mark.parametrize("outside", [0, -1, 49])
def test_table_outside_the_model(outside):
    """Set after construction, as an override of the config does: transformers checks only its own reading."""
    config = text_config()
    config.ple_layer_ids = [2, outside]
    with pytest.raises(errors.PleLayerOutsideModel) as refusal:
        plan_stages(config, 3)
    assert f"layer {outside}" in str(refusal.value) and "1 to 48" in str(refusal.value)


def test_all_refusals_are_one_family_of_value_errors():
    family = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(family) == 9
    assert all(issubclass(kind, PipelineStageError) and issubclass(kind, ValueError) for kind in family)


@pytest.mark.parametrize(
    "layers, size, first", [(48, 3, 1), (48, 7, 1), (48, 5, 3), (48, 46, 3), (7, 7, 1), (10, 4, 6)]
)
def test_proposal_is_even_and_complete(layers, size, first):
    counts = propose(layers, size, first)
    assert (len(counts), sum(counts)) == (size, layers)
    assert counts[0] >= first
    assert max(counts[1:]) - min(counts[1:]) <= 1


def test_suggestion_keeps_the_pipeline_where_it_fits():
    assert suggest(48, 3) == "VLLM_PP_LAYER_PARTITION=16,16,16"
    assert suggest(48, 99) == "pipeline_parallel_size=8 with VLLM_PP_LAYER_PARTITION=6,6,6,6,6,6,6,6"
    assert suggest(4, 9) == "pipeline_parallel_size=4 with VLLM_PP_LAYER_PARTITION=1,1,1,1"
