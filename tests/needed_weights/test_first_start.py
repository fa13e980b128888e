"""A first start says why it is silent, and a later one says nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm import triton_utils
from vllm.model_executor.model_loader import first_start


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What is said with so many compiled kernels in the cache; None: there is no cache yet."""

    def said(entries: int | None, cuda: bool = True) -> list[str]:
        lines: list[str] = []
        folder = tmp_path / f"cache {entries}"
        for entry in range(entries or 0):
            (folder / str(entry)).mkdir(parents=True)
        stand_in = SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir=str(folder))))
        monkeypatch.setattr(triton_utils, "triton", stand_in)
        monkeypatch.setattr(first_start, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
        monkeypatch.setattr(first_start.logger, "info_once", lambda text, *values: lines.append(text % values))
        first_start.announce()
        return lines

    return said


@pytest.mark.parametrize("entries", [None, 0, 99])
def test_a_new_cache_is_announced_with_its_place(said, entries):
    (line,) = said(entries)
    assert "First start" in line and f"cache {entries}" in line


def test_a_used_cache_is_not(said):
    assert not said(100)


def test_without_cuda_nothing_is_compiled(said):
    assert not said(None, cuda=False)
