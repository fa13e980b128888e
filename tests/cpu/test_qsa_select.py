"""Scores, selected groups and their tokens."""

import pytest
import torch

from vllm.models.qwen4_exp.cpu import qsa as twin
from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer as kernel

from .qsa_inputs import Batch, nan_pages

HEADS, WIDTH, PAGE, RATIO = 4, 32, 4, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(lengths, queries):
    batch = Batch(lengths, queries, page_size=PAGE, ratio=RATIO)
    cache = nan_pages(batch.num_pages, PAGE, 1, WIDTH)
    for request, length in enumerate(lengths):
        for group in range(length // RATIO):
            slot = batch.slot(request, group, PAGE)
            cache[slot // PAGE, slot % PAGE] = torch.randn(1, WIDTH).bfloat16()
    q = torch.randn(sum(queries), HEADS, WIDTH).bfloat16()
    return batch, cache, q


def brute_force(batch, cache, q, keep):
    """Best groups of each row, as sets."""
    chosen = []
    for row, (request, visible) in enumerate(zip(batch.token_to_req, batch.visible)):
        slots = [batch.slot(int(request), g, PAGE) for g in range(int(visible))]
        scores = [torch.relu(q[row].float() @ cache[s // PAGE, s % PAGE, 0].float()).sum() for s in slots]
        order = sorted(range(len(scores)), key=lambda g: -scores[g])
        chosen.append(set(order[:keep]))
    return chosen


def check(indices, want):
    for row, groups in zip(indices.tolist(), want):
        assert set(row[: len(groups)]) == groups
        assert all(group == -1 for group in row[len(groups) :])


@pytest.mark.parametrize("keep", [2, 5, 16])
def test_prefill(keep):
    batch, cache, q = inputs([50, 3, 17, 33], [13, 3, 17, 1])
    out = torch.full((q.shape[0], keep), -7, dtype=torch.int32)
    # As in a mixed batch: offsets of rows that follow some decodes.
    starts = batch.query_start_loc + 6
    twin.qsa_select_paged_prefill(
        q,
        cache,
        batch.block_table,
        starts,
        batch.visible,
        keep * RATIO,
        RATIO,
        17,
        out,
        50,
    )
    check(out, brute_force(batch, cache, q, keep))


@pytest.mark.parametrize("query_len", [1, 3])
def test_decode(query_len):
    batch, cache, q = inputs([50, 7, 33], [query_len] * 3)
    out = torch.full((q.shape[0], 4), -7, dtype=torch.int32)
    twin.qsa_select_paged_decode(q, cache, batch.block_table, batch.visible, 16, RATIO, query_len, out)
    check(out, brute_force(batch, cache, q, 4))


def test_scores_rank_as_the_kernel_does(monkeypatch):
    """The kernel's own logits, interpreted, lead to the same groups."""
    logits = []
    monkeypatch.setattr(kernel, "_topk", lambda x, *rest: logits.append(x))
    batch, cache, q = inputs([50, 29, 33], [1, 1, 1])
    cache = cache.nan_to_num()
    out = torch.empty(3, 4, dtype=torch.int32)
    arguments = (q, cache, batch.block_table, batch.visible, 16, RATIO, 1, out)
    kernel.qsa_select_paged_decode(*arguments)
    twin.qsa_select_paged_decode(*arguments)
    for row in range(3):
        visible = int(batch.visible[row])
        best = logits[0][row, :visible].topk(4).indices
        assert set(best.tolist()) == set(out[row].tolist())


@pytest.mark.parametrize("keep", [2, 6])
def test_expansion_equals_the_kernel(keep):
    positions = torch.tensor([0, 2, 3, 4, 9, 22, 23, 24, 40, -1])
    visible = ((positions + 1) // RATIO).clamp_min(0).int()
    blocks = torch.full((10, keep), -1, dtype=torch.int32)
    for row, count in enumerate(visible.tolist()):
        picked = torch.randperm(count)[:keep]
        blocks[row, : len(picked)] = picked.int()
    results = [torch.full((10, keep * RATIO + RATIO), -9).int() for _ in range(2)]
    for module, out in zip((twin, kernel), results):
        module.expand_qsa_block_indices(blocks, positions, visible, RATIO, keep * RATIO, out)
    assert torch.equal(*results)
    assert results[0][-1, -1] == 0
