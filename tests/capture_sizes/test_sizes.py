"""Which sizes are wanted, and which batches have no graph: on tables, and against upstream's own graph manager."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from vllm.config.compilation import CUDAGraphMode
from vllm.models.qwen4_exp.capture_sizes import Load, Missing, describe, missing_graphs, wanted_sizes
from vllm.v1.worker.gpu import cudagraph_utils

DECODE_ONLY, BOTH, PIECEWISE = (
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.PIECEWISE,
)


def load(users: int, stages: int = 3, rows: int = 1, budget: int = 2048) -> Load:
    return Load(users, stages, rows, budget)


WANTED = [
    (load(1), [1]),
    (load(4), [1, 2, 3, 4]),
    (load(7, stages=6), [1, 2, 3, 4, 5, 6, 7]),
    (load(4, rows=2), [2, 4, 6, 8]),
    (load(8, stages=1), [1, 2, 3, 4, 5, 6, 7, 8]),
    # An even spread of 12 is captured exactly, one of 20 is not.
    (load(24, stages=2), [*range(1, 13), 13, 14, 15, 16, 18, 20, 22, 24]),
    (load(20, stages=1), [*range(1, 9), 9, 10, 11, 12, 13, 14, 15, 16, 18, 20]),
    # The token budget holds 5 users of 3 rows.
    (load(64, rows=3, budget=16), [3, 6, 9, 12, 15]),
]


@pytest.mark.parametrize("load, sizes", WANTED, ids=lambda value: str(value) if isinstance(value, Load) else "")
def test_wanted_sizes(load, sizes):
    assert wanted_sizes(load) == sizes


def test_what_is_captured_anyway_is_not_asked_for_again():
    """256 users with three drafts: upstream stops at 512 rows, half of the users."""
    sizes = wanted_sizes(load(256, rows=4), above=512)
    assert sizes[:8] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert sizes[8:] == [576, 648, 728, 816, 916, 1024]


LOADS = [
    load(users, stages, rows, budget)
    for users, stages, rows, budget in product([1, 2, 4, 6, 7, 33, 256, 1024], [1, 3, 6], [1, 2, 5], [64, 2048])
]


@pytest.mark.parametrize("mode", [DECODE_ONLY, BOTH, PIECEWISE])
def test_wanted_sizes_leave_nothing_out(mode):
    for load in LOADS:
        assert missing_graphs(load, mode, wanted_sizes(load)) == Missing((), ()), load


def test_padding_stays_below_an_eighth_and_graphs_stay_few():
    for load in LOADS:
        sizes = wanted_sizes(load)
        assert all(later * 8 <= earlier * 9 for earlier, later in zip(sizes, sizes[1:]) if earlier >= 8 * load.rows)
        assert len(sizes) <= 60, load


MISSING = [
    # Four users on three stages, as published: only a batch of one has a graph.
    (load(4), DECODE_ONLY, [1], Missing((2, 3, 4), ())),
    (load(4), DECODE_ONLY, [1, 2, 4], Missing((), ())),
    (load(4), BOTH, [1], Missing((2, 3, 4), ())),
    # 8 exceeds six users and gets no full graph.
    (load(6), DECODE_ONLY, [1, 2, 4, 8], Missing((5, 6), ())),
    (load(6), BOTH, [1, 2, 4, 8], Missing((), (5, 6))),
    (load(6), PIECEWISE, [1, 2, 4, 8], Missing((), ())),
    (load(6), CUDAGraphMode.FULL, [1, 2, 4, 8], Missing((5, 6), ())),
    # Rounded up to users of two rows, 3 becomes 4 and exceeds the largest size.
    (load(2, rows=2), DECODE_ONLY, [1, 2, 3], Missing((2,), ())),
    (load(2, rows=2), BOTH, [1, 2, 3], Missing((2,), ())),
    (load(2, rows=2), DECODE_ONLY, [4], Missing((), ())),
    # No batch holds more users than the token budget.
    (load(64, budget=16), DECODE_ONLY, [16], Missing((), ())),
]


@pytest.mark.parametrize("load, mode, sizes, missing", MISSING)
def test_missing_graphs(load, mode, sizes, missing):
    assert missing_graphs(load, mode, sizes) == missing


@pytest.fixture
def manager(monkeypatch):
    """Upstream's graph manager, as if it had captured everything that it plans to."""
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: True)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)

    def build(load: Load, mode: CUDAGraphMode, sizes: list[int]):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=load.users),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
        )
        built = cudagraph_utils.CudaGraphManager(config, None, mode, load.rows)
        built._graphs_captured = True
        return built

    return build


LISTS = [[1], [4], [1, 2, 4], [1, 2, 4, 8], [3, 5], [2, 6, 10], [*range(1, 8)], [8, 16, 24, 512]]


@pytest.mark.parametrize("mode", [DECODE_ONLY, BOTH, PIECEWISE])
def test_the_graph_manager_agrees(manager, mode):
    """Every batch of every load: where we say that it has no graph, the manager finds none, and the reverse."""
    full = mode.decode_mode()
    for load, sizes in product(LOADS, [*LISTS, None]):
        sizes = sizes or wanted_sizes(load)
        graphs = manager(load, mode, sizes)
        found = {n: graphs.dispatch(n, n * load.rows, load.rows, 0).cg_mode for n in range(1, load.widest + 1)}
        assert missing_graphs(load, mode, sizes) == Missing(
            eager=tuple(n for n, graph in found.items() if graph == CUDAGraphMode.NONE),
            piecewise=tuple(n for n, graph in found.items() if graph not in (CUDAGraphMode.NONE, full)),
        ), (load, sizes)


def test_the_sentence():
    text = describe(load(4), Missing((2, 3, 4), ()), [1])
    assert text.startswith("Decode batches of 2 to 4 users run eagerly")
    for part in (
        "cudagraph_capture_sizes [1]",
        "3 pipeline stages makes batches of 2)",
        "[1, 2, 3, 4]",
        "--max-num-seqs (4)",
    ):
        assert part in text


def test_the_sentence_for_both_kinds_and_drafts():
    text = describe(load(8, rows=2), Missing((8,), (5, 6, 7)), [2, 4, 8, 14])
    assert "of 8 users run eagerly" in text and "and batches of 5 to 7 users run in piecewise graphs" in text
    assert "up to 8 users × 2 rows" in text and "[2, 4, 6, 8, 10, 12, 14, 16]" in text
