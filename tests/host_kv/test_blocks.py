"""The block size that workers choose with K/V in host memory, by stages, context, and what the user and backends ask."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.pipeline_parallel.geometry import GDN_PAGE
from vllm.models.qwen4_exp.qsa.host_kv import blocks
from vllm.models.qwen4_exp.qsa.host_kv.arena import Arena
from vllm.models.qwen4_exp.qsa.host_kv.blocks import block_unit, grow_attention_blocks
from vllm.models.qwen4_exp.qsa.host_kv.errors import KVOffloadRefused
from vllm.models.qwen4_exp.qsa.host_kv.lines import LINE
from vllm.models.qwen4_exp.qsa.host_kv.spec import spec_on_gpu
from vllm.v1.attention.backend import MultipleOf

from .planning import engine, machine, rows

CONTEXT = 262_144


@pytest.fixture
def grown(monkeypatch):
    """``grown(stages, …)``: the cache's settings after a worker sized its blocks; units of 16 tokens."""
    monkeypatch.setattr(blocks, "state_bytes", lambda config: GDN_PAGE)
    monkeypatch.setattr(blocks, "block_unit", lambda platform, config, backend: 16)

    def grow(stages: int, context: int = CONTEXT, mode: str = "align", asked: int | None = None, **options):
        with machine():
            config = engine(stages, context, **options)
            config.cache_config = SimpleNamespace(
                block_size=asked or 1568,
                user_specified_block_size=asked is not None,
                mamba_cache_mode=mode,
                mamba_block_size=1568 if mode == "align" else context,
                mamba_page_size_padded=3_211_264,
            )
            grow_attention_blocks(None, config, None)
        return config.cache_config

    return grow


@pytest.mark.parametrize(("stages", "block"), [(1, 4176), (2, 8352), (3, 12_528), (4, 16_704), (6, 25_056)])
def test_the_pooled_keys_of_a_stage_fill_a_state(grown, stages, block):
    """The sizes of the page's table (docs/ampere-multigpu/host-kv.md)."""
    cache = grown(stages)
    assert cache.block_size == block and cache.mamba_page_size_padded is None
    layers = -(-12 // stages)
    assert block * layers * 64 >= GDN_PAGE > (block - 16) * layers * 64


def test_index_keys_of_one_byte_make_it_twice_as_long(grown):
    assert grown(3, index_keys="fp8").block_size == pytest.approx(2 * 12_528, abs=16)


def test_states_are_kept_at_its_ends_where_they_are_kept_at_all(grown):
    """With prefix caching; without, a request has one state, whatever the block."""
    assert grown(3).mamba_block_size == 12_528
    assert grown(3, mode="none").mamba_block_size == CONTEXT


@pytest.mark.parametrize(("context", "block"), [(4096, 4096), (4097, 4112), (12_528, 12_528), (12_529, 12_528)])
def test_it_is_no_longer_than_the_longest_request(grown, context, block):
    assert grown(3, context).block_size == block


@pytest.mark.parametrize(("asked", "block"), [(64, 12_528), (12_528, 12_528), (20_000, 20_000), (20_001, 20_016)])
def test_a_larger_one_that_was_asked_for_stays(grown, asked, block):
    assert grown(3, asked=asked).block_size == block


@pytest.mark.parametrize(("mode", "alignment", "unit"), [("none", 64, 96), ("align", 64, 192), ("align", None, 96)])
def test_it_is_a_multiple_of_what_kernels_and_states_need(monkeypatch, mode, alignment, unit):
    """Kernel blocks of 16 and of any multiple of 96 (the smallest counts), groups of four tokens, ends of states."""
    monkeypatch.setattr("vllm.config.vllm.set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(
        "vllm.model_executor.layers.mamba.abstract.get_mamba_prefill_checkpoint_alignment", lambda config: alignment
    )
    backend = SimpleNamespace(get_supported_kernel_block_sizes=lambda: [16, 32, 64])
    others = [
        SimpleNamespace(get_supported_kernel_block_sizes=lambda: [MultipleOf(96)]),
        SimpleNamespace(get_supported_kernel_block_sizes=lambda: []),
    ]
    platform = SimpleNamespace(_find_non_ssm_backends=lambda config: others)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(indexer_compress_ratio=4)),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
    )
    assert block_unit(platform, config, backend) == unit


def test_an_arena_that_holds_no_two_groups_is_refused():
    """Rows of four tokens, 8 KiB in bf16, in each half; and a line of the cache, at which halves end."""
    published, least = rows(block=64, heads=2, width=256), 2 * (4 * 2048 + LINE)
    config = engine(3)
    config.qsa_config.arena_bytes = least - 1
    with pytest.raises(
        KVOffloadRefused, match=rf"arena_bytes \({least - 1}\), which holds less than two groups of 8192"
    ):
        spec_on_gpu(SimpleNamespace(), config, published)
    config.qsa_config.arena_bytes = least
    assert spec_on_gpu(SimpleNamespace(), config, published).row_bytes == 2048
    assert Arena(least, torch.device("cpu")).halves(4 * 2048).shape[1] >= 1
