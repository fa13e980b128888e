"""Workers whose attention backends differ agree on one KV cache layout, or say why they cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.config import CacheConfig
from vllm.models.qwen4_exp.common.qsa_cache import QSAStateBackend
from vllm.v1.attention.backends.stage_layouts import NoCommonKVCacheLayout, common_layouts
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

# What a stage of GDN layers and one with sparse layers report through upstream's own functions.
GDN_ONLY = [layout.name for layout in get_supported_kv_cache_layouts([])]
SPARSE = [layout.name for layout in get_supported_kv_cache_layouts([QSAStateBackend])]


def resolve(*reports: list[str]):
    vllm_config = SimpleNamespace(cache_config=CacheConfig(), kv_transfer_config=None)
    return resolve_kv_cache_layout(vllm_config, list(reports)).name, vllm_config.cache_config.kv_cache_layout


def test_the_two_kinds_of_stage_do_report_different_lists():
    assert GDN_ONLY != SPARSE and set(SPARSE) < set(GDN_ONLY)


@pytest.mark.parametrize("reports", [(GDN_ONLY, SPARSE), (SPARSE, GDN_ONLY), (SPARSE, GDN_ONLY, SPARSE)])
def test_engine_resolves_a_layout_that_every_stage_supports(reports):
    assert resolve(*reports) == (SPARSE[0], SPARSE[0])


def test_equal_lists_are_left_as_they_are():
    assert common_layouts([SPARSE, list(SPARSE)]) == SPARSE
    assert common_layouts([GDN_ONLY] * 3) == GDN_ONLY


def test_a_declared_preference_beats_the_default_order():
    declared = ["BLHNC", "BLNHC"]
    assert GDN_ONLY.index("BLNHC") < GDN_ONLY.index("BLHNC")
    assert common_layouts([GDN_ONLY, declared]) == declared


def test_lowest_rank_decides_between_equally_long_lists():
    assert common_layouts([["A", "B"], ["B", "A"]]) == ["A", "B"]
    assert common_layouts([["B", "A"], ["A", "B"]]) == ["B", "A"]


def test_layout_that_one_stage_lacks_is_left_out():
    assert common_layouts([["A", "B", "C"], ["C", "B", "D"], ["B", "C", "A", "D"]]) == ["B", "C"]


def test_refusal_lists_the_set_of_each_stage():
    with pytest.raises(NoCommonKVCacheLayout) as refusal:
        common_layouts([["A", "B"], ["C"], ["A", "B"]])
    assert "workers 0 2: A/B, worker 1: C" in str(refusal.value)


def test_engine_passes_the_refusal_on():
    with pytest.raises(NoCommonKVCacheLayout):
        resolve(["LBNHC"], ["BLNHC"])
