"""Figures against a plain reference, and the log line."""

import random

import numpy
import pytest

from vllm.v1.stage_times import summary
from vllm.v1.stage_times.recorder import Recorder, Series

from .clock import Clock


@pytest.mark.parametrize("number", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_percentiles_are_numpys(number, share):
    dice = random.Random(number)
    values = sorted(dice.expovariate(1) for _ in range(number))
    assert summary.percentile(values, share) == pytest.approx(numpy.percentile(values, 100 * share))


def test_a_series_in_milliseconds():
    series = Series()
    for value in (0.003, 0.001, 0.002):
        series.add(value)
    assert summary.describe(series) == {"count": 3, "total_ms": 6.0, "mean_ms": 2.0, "p50_ms": 2.0, "p90_ms": 2.8}


def test_a_summary_holds_every_kind_and_the_gpu():
    clock = Clock()
    recorder = Recorder("stage 1", clock)
    recorder.begin("wait")
    clock.now += 2
    recorder.end()
    clock.now += 1
    recorder.finish("decode")
    clock.now += 0.5
    recorder.finish("empty")
    forward = Series()
    forward.add(1)
    found = summary.summarise(recorder, {"decode": {"forward": forward}})
    assert found["part"] == "stage 1" and found["seconds"] == 3.5
    assert set(found["steps"]) == {"decode", "empty"}
    decode = found["steps"]["decode"]
    assert decode["whole"]["total_ms"] == 3000
    assert {phase: series["total_ms"] for phase, series in decode["phases"].items()} == {"wait": 2000, "other": 1000}
    assert decode["gpu"]["forward"]["mean_ms"] == 1000 and found["steps"]["empty"]["gpu"] == {}


def test_a_line_now_and_then_tells_what_came_since_the_last(monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "10")
    lines = []
    monkeypatch.setattr(summary.logger, "info", lambda text, *values: lines.append(text % values))
    clock = Clock()
    recorder = Recorder("stage 1", clock)
    summary.Log(recorder)

    def steps(number, seconds):
        for _ in range(number):
            recorder.begin("wait")
            clock.now += seconds
            recorder.end()
            recorder.finish("decode")

    steps(9, 1.0)
    assert not lines
    steps(1, 1.0)
    assert lines == ["stage 1: 10 decode steps in 10 s, 1000.00 ms each: wait 1000.00, other 0.00"]
    steps(20, 0.5)
    assert lines[1] == "stage 1: 20 decode steps in 10 s, 500.00 ms each: wait 500.00, other 0.00"
    recorder.reset()
    steps(5, 2.0)
    assert lines[2].startswith("stage 1: 5 decode steps in 10 s, 2000.00 ms each")
