"""Which scheduler is taken, in which flavour, and what its options refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.v1.core.sched import pipeline as pipeline_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.decode_batches import FixedBatches, MeasuredBatches
from vllm.v1.core.sched.pipeline import AsyncPipelineScheduler, PipelineScheduler
from vllm.v1.core.sched.pipeline_options import (
    KEY,
    SCHEDULER,
    PipelineOptionOutOfRange,
    PipelineOptions,
    PipelineOptionsNotMapping,
    PipelineOptionsUnused,
    UnknownPipelineOption,
    choose_scheduler,
    parse,
)
from vllm.v1.core.sched.scheduler import Scheduler

from .harness import Setup, engine_config

STOCK = "vllm.v1.core.sched.scheduler.Scheduler"


def config(stages: int, scheduler: str | None = None, additional: object = None) -> SimpleNamespace:
    """What the choice reads of a VllmConfig."""
    chosen = SimpleNamespace(scheduler_cls=scheduler)
    chosen.get_scheduler_cls = lambda: {STOCK: Scheduler, SCHEDULER: PipelineScheduler}[chosen.scheduler_cls]
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=chosen,
        additional_config={} if additional is None else additional,
    )


@pytest.mark.parametrize(
    "stages, given, expected", [(1, None, None), (2, None, SCHEDULER), (3, STOCK, STOCK), (1, SCHEDULER, SCHEDULER)]
)
def test_it_is_the_default_over_stages_and_gives_way_to_another(stages, given, expected):
    made = config(stages, given)
    choose_scheduler(made)
    assert made.scheduler_config.scheduler_cls == expected


def test_a_real_configuration_of_the_model_over_stages_has_it(model):
    from vllm.engine.arg_utils import EngineArgs

    def chosen(stages: int, **arguments) -> type:
        arguments |= {"max_model_len": 512, "skip_tokenizer_init": True, "load_format": "dummy"}
        made = EngineArgs(model=model, pipeline_parallel_size=stages, **arguments).create_engine_config()
        return made.scheduler_config.get_scheduler_cls()

    assert chosen(3) is PipelineScheduler
    assert chosen(1) is Scheduler
    assert chosen(3, scheduler_cls=STOCK) is Scheduler


@pytest.mark.parametrize("asynchronous, expected", [(False, PipelineScheduler), (True, AsyncPipelineScheduler)])
def test_one_name_gives_the_flavour_that_the_engine_runs(pipeline, asynchronous, expected):
    made = pipeline(Setup(asynchronous=asynchronous)).scheduler
    assert type(made) is expected
    assert isinstance(made, AsyncScheduler) is asynchronous


def test_options_reach_the_scheduler(pipeline):
    options = {"min_decode_batch": 2, "long_prefill_share": 0.25}
    assert pipeline(Setup(options=options)).scheduler.options == PipelineOptions(2, 0.25)
    assert pipeline(Setup()).scheduler.options == PipelineOptions(1, 0.5)
    assert pipeline(Setup()).scheduler.spread.batches.min_batch == 1
    measured = pipeline(Setup(options={"min_decode_batch": "measured"})).scheduler
    assert isinstance(measured.spread.batches, MeasuredBatches)


@pytest.mark.parametrize("cpu, expected", [(True, FixedBatches(3, 8)), (False, MeasuredBatches)])
def test_unset_rounds_are_measured_on_gpus_and_users_stay_together_on_a_cpu(pipeline, monkeypatch, cpu, expected):
    monkeypatch.setattr(type(pipeline_module.current_platform), "is_cpu", lambda self: cpu)
    made = pipeline(Setup())
    made.scheduler.vllm_config.additional_config.clear()
    again = PipelineScheduler(made.scheduler.vllm_config, made.scheduler.kv_cache_config, None, block_size=16)
    assert vars(again.spread.batches) == vars(expected) if cpu else type(again.spread.batches) is expected


def test_other_keys_of_the_additional_configuration_are_not_ours():
    assert parse({"gdn_prefill_backend": "x"}) == PipelineOptions()
    assert parse(object()) == PipelineOptions()


@pytest.mark.parametrize("value", [3, "even", ["min_decode_batch"]])
def test_options_are_an_object(value):
    with pytest.raises(PipelineOptionsNotMapping, match="min_decode_batch"):
        parse({KEY: value})


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(UnknownPipelineOption, match=r"\['min_decode_bach'\].*min_decode_batch"):
        parse({KEY: {"min_decode_bach": 2}})


@pytest.mark.parametrize(
    "option, value",
    [("min_decode_batch", v) for v in (0, -1, 1.5, True, "2", "fastest")]
    + [("long_prefill_share", v) for v in (0, -0.5, 1.01, float("nan"), True, "0.5", None)],
)
def test_a_value_out_of_range_is_refused(option, value):
    with pytest.raises(PipelineOptionOutOfRange, match=option):
        parse({KEY: {option: value}})


@pytest.mark.parametrize("stages, scheduler", [(1, None), (3, STOCK)])
def test_options_that_nothing_would_read_are_refused(stages, scheduler):
    with pytest.raises(PipelineOptionsUnused, match=SCHEDULER):
        choose_scheduler(config(stages, scheduler, {KEY: {}}))
    choose_scheduler(config(stages, SCHEDULER, {KEY: {}}))


def test_a_wrong_option_ends_the_configuration(model):
    with pytest.raises(ValueError, match="unknown_option"):
        engine_config(model, Setup(options={"unknown_option": 1}))
