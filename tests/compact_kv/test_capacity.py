"""Pages by format at the published geometry, from upstream's alignment and planner."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kv_capacity import AIMS, CASES, FORMATS, GIB, planned
from benchmarks.kv_pages import CAPACITY
from benchmarks.record import read
from tests.pipeline_parallel.geometry import CONTEXT, GDN_PAGE, KV, Sizes, qsa_specs, text_config
from tests.pipeline_parallel.planner import Plan
from tests.pipeline_parallel.stage_platform import aligned_configs
from vllm.models.qwen4_exp.common.qsa_cache import QSAStateBackend
from vllm.models.qwen4_exp.qsa.formats import kv_format
from vllm.models.qwen4_exp.stages import plan_stages

INT8, FP8, BF16 = KV("int8_per_token_head"), KV("fp8"), KV()
MAIN = "model.layers.3.self_attn.attn"


@pytest.mark.parametrize(("kv", "token_bytes"), [(BF16, 2048), (FP8, 1024), (INT8, 1040)])
def test_bytes_of_a_token(kv, token_bytes):
    """Two heads of 256 for K and V, and for int8 an fp32 scale each; what the kernels expect of a page."""
    specs = qsa_specs(text_config(), 3, Sizes(block=16), kv)
    assert specs[MAIN].page_size_bytes == 16 * token_bytes
    assert specs[MAIN].state_content_size_bytes == kv_format(kv.cache_dtype).token_bytes(256)
    assert specs[MAIN].dtype == kv_format(kv.cache_dtype).dtype
    side = {spec.page_size_bytes for name, spec in specs.items() if name != MAIN}
    assert side == {
        spec.page_size_bytes for name, spec in qsa_specs(text_config(), 3, Sizes(block=16)).items() if name != MAIN
    }


def test_side_caches_have_no_scales():
    specs = qsa_specs(text_config(), 3, Sizes(), INT8)
    for name, spec in specs.items():
        if name != MAIN:
            assert QSAStateBackend.customize_spec(spec) is spec and spec.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize(("kv", "block"), [(BF16, 1568), (FP8, 3136), (INT8, 3088)])
@pytest.mark.parametrize("stages", [1, 3])
def test_block_alignment_counts_the_scales(kv, block, stages, mode):
    """A page of K/V covers a state of linear attention, and that state is padded to it, on every stage alike."""
    for config in aligned_configs(plan_stages(text_config(), stages), mode, kv):
        cache = config.cache_config
        page = qsa_specs(text_config(), 3, Sizes(cache.block_size), kv)[MAIN].page_size_bytes
        assert cache.block_size == block
        assert GDN_PAGE <= page == cache.mamba_page_size_padded < GDN_PAGE * 1.01


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("int8_per_token_head", 1.85),
        ("fp8", 1.92),
        ("int8, index keys in fp8", 1.965),
        ("fp8, index keys in fp8", 2.0),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_of_a_pool(case, name, least):
    """fp8 halves K/V, not the 64 bytes of index keys beside them, unless those are fp8 too."""
    stages, gib, requests = case
    base, compact = (planned(FORMATS[key], stages, gib * GIB).tokens(requests) for key in ("bf16", name))
    assert compact >= least * base


def test_the_record_is_what_the_planner_says():
    found = read(CAPACITY)
    for sample in found["samples"]:
        plan = planned(FORMATS[sample["format"]], sample["stages"], sample["gib"] * GIB)
        assert sample["tokens"] == plan.tokens(sample["requests"]), sample
    assert {claim["name"].removeprefix("tokens in ").split(" / ")[0] for claim in found["claims"]} == set(AIMS)


@pytest.mark.parametrize(
    "kv", [FP8, INT8, KV("int8_per_token_head", index_keys=torch.float8_e4m3fn)], ids=["fp8", "int8", "int8, fp8 keys"]
)
@pytest.mark.parametrize("skipped", [(3,), (3, 47), tuple(range(3, 48, 4))], ids=str)
@pytest.mark.parametrize(("stages", "partition"), [(1, None), (3, None), (4, "2,16,16,14")])
def test_skipped_layers_share_the_pool(stages, partition, skipped, kv):
    """Every cache of every stage finds its bytes inside its block, whatever the mixture of pages."""
    kv = KV(kv.cache_dtype, skipped, kv.index_keys)
    parts = plan_stages(text_config(), stages, partition=partition)
    caches = [config.cache_config for config in aligned_configs(parts, kv=kv)]
    widest = max(caches, key=lambda cache: cache.block_size)
    sizes = Sizes(widest.block_size, CONTEXT, widest.mamba_page_size_padded)
    plan = Plan(text_config(), stages, partition, 8 * GIB, sizes, kv)
    blocks = {worker.num_blocks for worker in plan.workers}
    assert len(blocks) == 1 and blocks.pop() > 100
    for stage, worker in zip(plan.specs, plan.workers, strict=True):
        for tensor in worker.kv_cache_tensors:
            page = stage[tensor.layers[0]].page_size_bytes
            per_block = tensor.size // worker.num_blocks
            assert tensor.offset + (len(tensor.layers) - 1) * tensor.layer_stride + page <= per_block
    main = {name: spec.dtype for stage in plan.specs for name, spec in stage.items() if name.endswith(".attn")}
    wide = {int(name.split(".")[2]) for name, dtype in main.items() if dtype == torch.bfloat16}
    assert wide == set(skipped) and len(main) == 12
