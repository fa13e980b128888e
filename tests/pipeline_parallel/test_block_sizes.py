"""Block sizes of a stage without sparse layers: wrong as upstream derives them, equal after the exchange."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import vllm.v1.worker.stage_block_sizes as exchange
from vllm.models.qwen4_exp.stages import plan_stages
from vllm.platforms.interface import Platform
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.stage_block_sizes import (
    BlockSizes,
    StageReport,
    StagesDisagreeOnBlockSizes,
    agree,
    report,
    update_block_sizes_on_all_stages,
)

from .geometry import BLOCK, CONTEXT, PADDED_PAGE, Sizes, layer_specs, text_config
from .planner import engine_config
from .stage_platform import aligned_configs, alignment_without_a_model, worker_config

PARTITION = "2,16,16,14"
MODES = ["none", "align"]


@pytest.fixture
def aligned(monkeypatch):
    """Workers of every stage after upstream's own alignment, with the defaults of a GPU platform."""
    monkeypatch.setattr(exchange, "current_platform", Platform)

    def workers(partition: str | None, pipeline_size: int, mode: str):
        return aligned_configs(plan_stages(text_config(), pipeline_size, partition=partition), mode)

    # For the workers that a test aligns itself.
    with alignment_without_a_model():
        yield workers


def sizes_of(configs) -> list[BlockSizes]:
    return [BlockSizes.of(config.cache_config) for config in configs]


def whole_model(mode: str) -> BlockSizes:
    return BlockSizes(BLOCK, BLOCK if mode == "align" else CONTEXT, PADDED_PAGE, None)


def planned(configs, mode: str):
    """(groups, scheduler block size) that the engine core makes of these workers' sizes."""
    engine = engine_config(len(configs), mode)
    register_all_kvcache_specs(engine)
    stages = plan_stages(text_config(), len(configs), partition=PARTITION)
    specs = []
    for stage, sizes in zip(stages, sizes_of(configs), strict=True):
        local = Sizes(sizes.block_size, sizes.mamba_block_size, sizes.mamba_page_size_padded)
        specs.append(layer_specs(text_config(), stage.layers, local, mode))
    groups = get_global_kv_cache_groups(engine, specs)
    workers = get_kv_cache_configs(engine, specs, [10 * 2**30] * len(configs), groups)
    return groups, resolve_kv_cache_block_sizes(generate_scheduler_kv_cache_config(workers), engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pipeline_size", [1, 3, 6])
def test_stages_with_sparse_layers_agree_by_themselves(aligned, pipeline_size, mode):
    assert set(sizes_of(aligned(None, pipeline_size, mode))) == {whole_model(mode)}


@pytest.mark.parametrize("mode, kept", [("none", CONTEXT), ("align", 16)])
def test_stage_without_sparse_layers_keeps_the_defaults(aligned, mode, kept):
    """The defect, #51752: remove the exchange when this fails because upstream aligns such a stage."""
    first, *others = sizes_of(aligned(PARTITION, 4, mode))
    assert first == BlockSizes(16, kept, None, None)
    assert set(others) == {whole_model(mode)}


@pytest.mark.parametrize("mode", MODES)
def test_all_stages_end_with_the_sizes_of_the_whole_model(aligned, mode):
    configs = aligned(PARTITION, 4, mode)
    agreed = agree([report(config) for config in configs])
    for config in configs:
        agreed.adopt(config.cache_config)
    assert set(sizes_of(configs)) == {whole_model(mode)}


@pytest.mark.parametrize("mode", MODES)
def test_what_the_defect_does_to_the_plan(aligned, mode):
    """Layers of the first stage fall into groups of their own, and hashes become as fine as 16 tokens."""
    configs = aligned(PARTITION, 4, mode)
    broken_groups, broken_blocks = planned(configs, mode)
    agreed = agree([report(config) for config in configs])
    for config in configs:
        agreed.adopt(config.cache_config)
    groups, blocks = planned(configs, mode)
    assert len(groups) == 6 < len(broken_groups)
    if mode == "align":
        assert (broken_blocks, blocks) == ((BLOCK, 16), (BLOCK, BLOCK))


@pytest.mark.parametrize("exchanged", [False, True])
def test_prefill_chunks_end_where_every_stage_keeps_a_state(aligned, exchanged):
    """States are filed at the end of a chunk, so upstream's scheduler ends chunks on block boundaries. With the
    defect it takes 16 tokens for the block, and chunks end where the other stages, at 1568, have no boundary."""
    configs = aligned(PARTITION, 4, "align")
    if exchanged:
        agreed = agree([report(config) for config in configs])
        for config in configs:
            agreed.adopt(config.cache_config)
    groups, (scheduler_block, hash_block) = planned(configs, "align")
    # As the engine core sets it: the smallest block of the groups whose blocks can be reused.
    cacheable = [group.kv_cache_spec for group in groups if group.kv_cache_spec.prefix_cacheable]
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=min(spec.block_size for spec in cacheable)),
        block_size=scheduler_block,
        hash_block_size=hash_block,
        max_num_scheduled_tokens=2048,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        num_hash_lookahead_tokens=0,
        use_eagle_block_drop=False,
        mamba_partial_cache_hit=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_shared_prefix_checkpoint=False,
    )
    prompt = SimpleNamespace(num_computed_tokens=0, num_tokens=8000, num_prompt_tokens=8000, shared_prefix_boundary=0)
    chunk = Scheduler._mamba_block_aligned_split(scheduler, prompt, 2048)
    assert chunk == (BLOCK if exchanged else 2048)


def sizes(block: int) -> BlockSizes:
    return BlockSizes(block, block, block * 2048, None)


def test_stage_without_attention_never_decides():
    without, informed = StageReport(False, sizes(16)), StageReport(True, sizes(32))
    for reports in ([without, informed, informed], [informed, without], [informed, StageReport(False, sizes(64))]):
        assert agree(reports) == sizes(32)


def test_without_attention_anywhere_nothing_changes():
    assert agree([StageReport(False, sizes(16)), StageReport(False, sizes(16))]) == sizes(16)


def test_refusal_lists_each_stage_that_has_attention():
    reports = [StageReport(True, sizes(32)), StageReport(False, sizes(16)), StageReport(True, sizes(48))]
    with pytest.raises(StagesDisagreeOnBlockSizes) as refusal:
        agree(reports)
    message = str(refusal.value)
    named = ["stage 0: ", "block_size=32", "stage 2: ", "block_size=48", "--block-size"]
    assert [text for text in named if text not in message] == []
    assert "stage 1: " not in message


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_adopts_what_the_group_reports(aligned, monkeypatch, rank):
    configs = aligned(PARTITION, 4, "align")
    mine = worker_config(plan_stages(text_config(), 4, partition=PARTITION)[rank], 4, "align")

    def gather(into, own, group):
        into[:] = [report(config) for config in configs]
        assert into[rank] == own and group == "cpu group"

    monkeypatch.setattr(exchange, "get_pp_group", lambda: SimpleNamespace(world_size=4, cpu_group="cpu group"))
    monkeypatch.setattr(exchange.torch.distributed, "all_gather_object", gather)
    update_block_sizes_on_all_stages(mine)
    assert BlockSizes.of(mine.cache_config) == whole_model("align")


def test_single_stage_exchanges_nothing(aligned, monkeypatch):
    monkeypatch.setattr(exchange, "get_pp_group", lambda: pytest.fail("there is nobody to ask"))
    (stage,) = plan_stages(text_config(), 1)
    alone = worker_config(stage, 1, "none")
    update_block_sizes_on_all_stages(alone)
    assert BlockSizes.of(alone.cache_config) == whole_model("none")


def test_worker_process_runs_the_exchange_after_loading(monkeypatch):
    """The hook: between loading, which registers the layers, and the queues, after which the engine asks for specs."""
    from vllm.v1.executor import multiproc_executor as executor

    steps = []

    class Wrapper:
        def __init__(self, **ranks):
            pass

        def __getattr__(self, name):
            return lambda *args: steps.append(name)

    monkeypatch.setattr(executor, "WorkerWrapperBase", Wrapper)
    monkeypatch.setattr(executor, "enable_envs_cache", lambda: None)
    monkeypatch.setattr(executor.WorkerProc, "setup_proc_title_and_log_prefix", lambda self, **kind: None)
    monkeypatch.setattr(executor.WorkerProc, "_init_message_queues", lambda self, *args: steps.append("queues"))
    monkeypatch.setattr(exchange, "update_block_sizes_on_all_stages", lambda config: steps.append("exchange"))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, enable_expert_parallel=False),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    executor.WorkerProc(config, 0, 0, "", None, None, True)
    assert steps == ["init_worker", "init_device", "load_model", "exchange", "queues"]
