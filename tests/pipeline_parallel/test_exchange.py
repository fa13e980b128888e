"""The exchange of block sizes over a real pipeline group: two processes, gloo, no device."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace

import vllm.v1.worker.stage_block_sizes as exchange
from vllm.config import CacheConfig

SIZES = {"block_size": 1568, "mamba_block_size": 1568, "mamba_page_size_padded": 3_211_264}


class AlignsLastStageOnly:
    """A platform that finds attention layers on stage 1 and none on stage 0."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def update_block_size_for_backend(self, vllm_config) -> None:
        if self.rank == 1:
            for name, value in SIZES.items():
                setattr(vllm_config.cache_config, name, value)

    def _find_non_ssm_backends(self, vllm_config) -> list:
        return ["backend"] if self.rank == 1 else []


def stage(rank: int, rendezvous: str, results) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    # The executor sets this for the workers of one engine; the CPU communicator names its segment after it.
    os.environ["VLLM_DIST_IDENT"] = f"stages{os.getppid()}"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(2, rank, f"file://{rendezvous}", rank, "gloo")
        parallel_state.initialize_model_parallel(1, 2, backend="gloo")
    exchange.current_platform = AlignsLastStageOnly(rank)
    cache = CacheConfig()
    exchange.update_block_sizes_on_all_stages(
        SimpleNamespace(
            cache_config=cache,
            model_config=object(),
            parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        )
    )
    results.put((rank, {name: getattr(cache, name) for name in SIZES}))
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def test_both_stages_end_with_the_sizes_of_the_one_that_has_attention(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=stage, args=(rank, str(tmp_path / "rendezvous"), results)) for rank in range(2)]
    try:
        for worker in workers:
            worker.start()
        found = dict(results.get(timeout=30) for _ in workers)
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    assert found == {0: SIZES, 1: SIZES}
