"""Which stage owns what, for partitions that work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import vllm.models.qwen4_exp.stages as stages_module
from vllm.config import CacheConfig
from vllm.config.switches import SwitchNotBoolean
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.config import (
    Qwen3_5ForConditionalGenerationConfig,
    Qwen4ExpForConditionalGenerationConfig,
)
from vllm.models.qwen4_exp.partition import DeepstackBeyondFirstStage, PartitionSum, StageWithoutStates
from vllm.models.qwen4_exp.stages import check_stages, describe, plan_stages
from vllm.models.qwen4_exp.tensor_ranks import TensorRanksNotServed

from .geometry import text_config


@pytest.fixture(autouse=True)
def no_partition(monkeypatch):
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


def engine_config(pipeline_size: int, hf_config=None, multimodal=None, prefix_caching=False):
    """What configuration checks read of a VllmConfig."""
    text = text_config()
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, hf_config=hf_config or text, multimodal_config=multimodal),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=pipeline_size,
            tensor_parallel_size=1,
            enable_expert_parallel=False,
            use_sequence_parallel_moe=False,
            enable_dbo=False,
            ubatch_size=0,
        ),
        cache_config=CacheConfig(enable_prefix_caching=prefix_caching),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        additional_config={},
        speculative_config=None,
    )


def vision_engine_config(pipeline_size: int, language_model_only: bool = False):
    vision = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
    multimodal = SimpleNamespace(language_model_only=language_model_only)
    return engine_config(pipeline_size, SimpleNamespace(vision_config=vision), multimodal)


def test_one_stage_owns_everything():
    (only,) = plan_stages(text_config(), 1)
    assert only.layers == range(48)
    assert (len(only.gdn_layers), len(only.qsa_layers), only.ple_layers) == (36, 12, (1,))


def test_kinds_and_table_of_three_stages():
    first, second, third = plan_stages(text_config(), 3)
    assert first.qsa_layers == (3, 7, 11, 15)
    assert first.gdn_layers == (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)
    assert (first.has_ple, second.has_ple, third.has_ple) == (True, False, False)
    assert third.layers == range(32, 48)


@pytest.mark.parametrize("pipeline_size", [1, 2, 3, 5, 6, 7, 48])
def test_default_split_is_upstreams(pipeline_size):
    owned = [(stage.layers.start, stage.layers.stop) for stage in plan_stages(text_config(), pipeline_size)]
    assert owned == [get_pp_indices(48, rank, pipeline_size) for rank in range(pipeline_size)]


@pytest.mark.parametrize("partition", ["16,16,16", "3,22,23", " 2, 23 ,23", "46,1,1"])
def test_variable_is_read_as_the_workers_will_read_it(monkeypatch, partition):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    owned = [(stage.layers.start, stage.layers.stop) for stage in plan_stages(text_config(), 3)]
    assert owned == [get_pp_indices(48, rank, 3) for rank in range(3)]


def test_argument_stands_in_for_the_variable(monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "16,16,16")
    assert len(plan_stages(text_config(), 4, partition="2,16,16,14")[0].layers) == 2


def test_short_stage_has_no_sparse_layer():
    first = plan_stages(text_config(), 4, partition="2,16,16,14")[0]
    assert (first.qsa_layers, first.gdn_layers, first.ple_layers) == ((), (0, 1), (1,))


def test_table_may_sit_on_any_stage():
    owners = [stage.has_ple for stage in plan_stages(text_config(ple_layer_ids=[18]), 3)]
    assert owners == [False, True, False]


def test_tables_on_several_stages_are_allowed():
    """Each PLE layer has a table of its own, and token ids reach every rank."""
    owned = [stage.ple_layers for stage in plan_stages(text_config(ple_layer_ids=[2, 17, 18]), 3)]
    assert owned == [(1,), (16, 17), ()]


def test_model_without_table():
    assert not any(stage.has_ple for stage in plan_stages(text_config(ple_layer_ids=[]), 3))


def test_description_names_every_stage():
    assert describe(plan_stages(text_config(), 3, partition="1,23,24")) == (
        "stage 0: layer 0 (1 GDN, 0 QSA); "
        "stage 1: layers 1-23 (17 GDN, 6 QSA, PLE on 1); "
        "stage 2: layers 24-47 (18 GDN, 6 QSA)"
    )


@pytest.mark.parametrize("pipeline_size, lines", [(1, 0), (3, 1)])
def test_only_pipelines_are_logged(monkeypatch, pipeline_size, lines):
    logged = []
    monkeypatch.setattr(stages_module.logger, "info_once", lambda *args: logged.append(args))
    check_stages(engine_config(pipeline_size))
    assert len(logged) == lines


def test_vision_levels_count_only_where_the_vision_class_is_built(monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,23,23")
    with pytest.raises(DeepstackBeyondFirstStage):
        check_stages(vision_engine_config(3))
    # The vision class asserts this even when it serves text only.
    with pytest.raises(DeepstackBeyondFirstStage):
        check_stages(vision_engine_config(3, language_model_only=True))
    text_class = vision_engine_config(3)
    text_class.model_config.multimodal_config = None
    assert len(check_stages(text_class)) == 3


def test_vision_is_served_when_the_first_stage_holds_its_levels(monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,22,23")
    assert len(check_stages(vision_engine_config(3))) == 3


def test_stage_of_one_sparse_layer_is_refused_only_with_prefix_caching(monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1,44")
    assert check_stages(engine_config(3))[1].gdn_layers == ()
    with pytest.raises(StageWithoutStates):
        check_stages(engine_config(3, prefix_caching=True))


@pytest.fixture
def verify(monkeypatch):
    """Upstream's own check of the configuration, without the parts that belong to other models."""
    monkeypatch.setattr(Qwen3_5ForConditionalGenerationConfig, "verify_and_update_config", lambda vllm_config: None)
    return Qwen4ExpForConditionalGenerationConfig.verify_and_update_config


def test_configuration_accepts_a_pipeline(verify):
    verify(engine_config(3))


def test_configuration_refuses_a_bad_partition(verify, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "16,16,17")
    with pytest.raises(PartitionSum):
        verify(engine_config(3))


def test_configuration_refuses_ranks_that_divide_nothing(verify):
    config = engine_config(1)
    config.parallel_config.tensor_parallel_size = 3
    with pytest.raises(TensorRanksNotServed, match="--pipeline-parallel-size 3 would work"):
        verify(config)


def test_a_wrong_switch_is_refused_before_the_model_is_loaded():
    config = engine_config(2)
    config.additional_config = {"stage_times": "yes"}
    with pytest.raises(SwitchNotBoolean, match="'yes'"):
        check_stages(config)
