"""Recorders of the code under test run on a clock of ours."""

from types import SimpleNamespace

import pytest

from vllm.v1.stage_times import recorder

from .clock import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=clock))
    return clock
