"""Group means and cache rows against upstream's Triton kernels, interpreted."""

import pytest
import torch

from vllm.models.qwen4_exp.cpu import qsa as twin
from vllm.models.qwen4_exp.nvidia.ops import qsa as kernel

from .qsa_inputs import Batch, CudaLooking, nan_pages

WIDTH = 24


def looking_like_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(CudaLooking)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(5, WIDTH), (5, 1, WIDTH)])
def test_store_rows(shape):
    rows = torch.randn(*shape).bfloat16()
    slots = torch.tensor([7, -1, 0, 23, 24])  # the last lies beyond six pages of four
    caches = [nan_pages(6, 4, 1, WIDTH + 3)[..., :WIDTH] for _ in range(2)]
    twin.qsa_store_cache_rows(caches[0], slots, rows)
    kernel.qsa_store_cache_rows(looking_like_cuda(caches[1]), slots, rows)
    torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)
    assert caches[0].isfinite().sum() == 3 * WIDTH


def test_store_refuses_what_does_not_fit():
    cache = nan_pages(2, 4, 1, WIDTH)
    with pytest.raises(ValueError, match="pages, page_size, 1, width"):
        twin.qsa_store_cache_rows(cache[:, :, 0], torch.tensor([0]), cache[0, :1, 0])
    with pytest.raises(ValueError, match="2 QSA rows for 1 slots"):
        twin.qsa_store_cache_rows(cache, torch.tensor([0]), cache[0, :2, 0])


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("lengths, queries", [([9, 4, 30], [9, 4, 30]), ([9, 6, 30, 3], [2, 1, 11, 3])])
def test_group_means(lengths, queries, with_positions):
    batch = Batch(lengths, queries, page_size=8)
    rows = sum(queries)
    keys = torch.randn(rows, 1, WIDTH).bfloat16()
    positions = torch.randint(0, 99, (rows, 1, 3))
    ring = torch.randn(batch.num_pages, 8, 1, WIDTH).bfloat16()
    ring_positions = torch.randint(0, 99, (batch.num_pages, 8, 1, 3))
    arguments = (
        positions,
        ring,
        batch.block_table,
        batch.token_to_req,
        batch.query_start_loc,
        batch.positions,
        batch.compressed_slots(8),
        batch.ratio,
        ring_positions if with_positions else None,
    )
    means, firsts = twin.qsa_compress_groups_with_ratio(keys, *arguments)
    want_means, want_firsts = kernel.qsa_compress_groups_with_ratio(looking_like_cuda(keys), *arguments)
    ends = batch.compressed_slots(8) >= 0
    assert ends.any() and not ends.all()
    torch.testing.assert_close(means[ends], want_means[ends], rtol=2**-7, atol=1e-6)
    assert torch.equal(firsts[ends], want_firsts[ends])


def test_chunks_equal_the_whole():
    """A group cut anywhere by a step's end has the same mean."""
    total, ratio, ring_size = 22, 4, 8
    keys = torch.randn(total, 1, WIDTH).bfloat16()

    def run(*cuts: int) -> torch.Tensor:
        ring = nan_pages(2, ring_size, 1, WIDTH)
        means = []
        edges = [0, *cuts, total]
        for begin, end in zip(edges, edges[1:]):
            batch = Batch([end], [end - begin], page_size=64)
            chunk = keys[begin:end]
            ends = batch.compressed_slots(64) >= 0
            mean, _ = twin.qsa_compress_groups_with_ratio(
                chunk,
                torch.zeros(end - begin, 1, 3, dtype=torch.int64),
                ring,
                torch.tensor([[1]], dtype=torch.int32),
                batch.token_to_req,
                batch.query_start_loc,
                batch.positions,
                batch.compressed_slots(64),
                ratio,
            )
            means.append(mean[ends])
            kept = chunk[-ring_size:]
            slots = torch.arange(end - len(kept), end) % ring_size + ring_size
            twin.qsa_store_cache_rows(ring, slots, kept)
        return torch.cat(means)

    whole = run()
    assert whole.isfinite().all() and len(whole) == total // ratio
    for cut in range(1, total):
        assert torch.equal(run(cut), whole), cut
    assert torch.equal(run(*range(1, total)), whole)


def test_norm_has_unit_mean_square():
    x = torch.randn(5, 64).bfloat16() * 30
    out = twin.gemma_rmsnorm(x, torch.zeros(64).bfloat16(), 1e-6).float()
    torch.testing.assert_close(out.square().mean(1), torch.ones(5), rtol=1e-2, atol=0)
