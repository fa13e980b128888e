"""Reading times from an engine, and samples made of them."""

import asyncio
from types import SimpleNamespace

import pytest

from benchmarks import host_time

SERIES = {"count": 4, "total_ms": 8.0, "mean_ms": 2.0, "p50_ms": 2.0, "p90_ms": 3.0}
STEP = {
    "whole": SERIES | {"total_ms": 12.0},
    "phases": {"other": SERIES | {"total_ms": 4.0}, "wait": SERIES},
    "gpu": {"forward": SERIES},
}
ANSWERS = [
    [{"part": "engine core", "seconds": 2.0, "steps": {}}],
    [
        {"part": "stage 0", "seconds": 1.0, "steps": {"decode": STEP}},
        {"part": "stage 0, answers", "seconds": 1.0, "steps": {}},
    ],
]


class Engine:
    def __init__(self, additional_config):
        self.vllm_config = SimpleNamespace(additional_config=additional_config)
        self.asked = []

    def collective_rpc(self, method):
        self.asked.append(method)
        return ANSWERS


class AsyncEngine(Engine):
    async def collective_rpc(self, method):
        return super().collective_rpc(method)


def test_an_engine_is_asked_whatever_holds_it():
    engine = Engine({"stage_times": True})
    host_time.reset(SimpleNamespace(llm_engine=engine, collective_rpc=engine.collective_rpc))
    assert list(host_time.collect(engine)) == ["engine core", "stage 0", "stage 0, answers"]
    assert engine.asked == ["reset_stage_times", "stage_times"]

    async def served(engine):
        await host_time.areset(engine)
        return await host_time.acollect(engine)

    assert asyncio.run(served(AsyncEngine({"stage_times": True}))) == host_time.collect(engine)


@pytest.mark.parametrize("config", [{}, {"stage_times": False}])
def test_an_engine_without_times_is_refused(config):
    for ask in (host_time.reset, host_time.collect):
        with pytest.raises(host_time.StageTimesOff, match="additional_config"):
            ask(Engine(config))
    for ask in (host_time.areset, host_time.acollect):
        with pytest.raises(host_time.StageTimesOff):
            asyncio.run(ask(AsyncEngine(config)))


def test_samples():
    figures = host_time.collect(Engine({"stage_times": True}))
    samples = host_time.rows(figures, stages=2)
    assert [(sample["phase"], sample["ms_per_step"]) for sample in samples] == [
        ("whole", 3.0),
        ("wait", 2.0),
        ("other", 1.0),
        ("GPU forward", 2.0),
    ]
    assert all(sample["part"] == "stage 0" and sample["stages"] == 2 for sample in samples)
