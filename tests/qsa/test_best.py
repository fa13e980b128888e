"""The best of a list: lists that a search by interpolation could stumble over."""

import numpy as np
import pytest
import torch

from vllm.models.qwen4_exp.qsa.best import bound, count_from, keep_best, least
from vllm.triton_utils import tl, triton

LARGEST = 2**31 - 2


@triton.jit
def _kernel(numbers_ptr, out_ptr, low, BLOCKS: tl.constexpr, KEEP: tl.constexpr):
    first = 8 * tl.arange(0, BLOCKS)
    at = numbers_ptr + first[:, None] + tl.arange(0, 4)[None, :]
    left, right = tl.load(at), tl.load(at + 4)
    if low < 0:
        low = least(left, right)
    reached = keep_best(left, right, low, count_from(left, right, low), bound(left, right), first, out_ptr, KEEP)
    tl.store(out_ptr + KEEP, reached)


def best(numbers: np.ndarray, keep: int, low: int = -1) -> tuple[list[int], int]:
    """What the kernel keeps, and the integer that it says they reach; no store misses the ``keep`` places."""
    out = torch.full((keep + 3,), -7, dtype=torch.int32)
    _kernel[(1,)](torch.from_numpy(numbers.astype(np.int32)), out, low, BLOCKS=len(numbers) // 8, KEEP=keep)
    assert out[keep + 1 :].tolist() == [-7, -7]
    return out[:keep].tolist(), int(out[keep])


def by_rank(numbers: np.ndarray, keep: int) -> list[int]:
    return sorted(np.argsort(-numbers.astype(np.int64), kind="stable")[:keep].tolist())


RANDOM = np.random.default_rng(0)
N = 256
LISTS = {
    "anything": RANDOM.integers(0, LARGEST, N),
    "as scores": RANDOM.gamma(4.0, 10.0, N).astype(np.float32).view(np.int32),
    "one value": np.full(N, 12345),
    "zeros": np.zeros(N),
    "all NaN": np.full(N, LARGEST),
    "two neighbours": RANDOM.integers(0, 2, N) + 77,
    "few values": RANDOM.integers(0, 5, N) * 2**28,
    "powers of two": 2 ** RANDOM.integers(0, 31, N),
    "ascending": np.arange(N),
    "one far above": np.where(np.arange(N) == 200, LARGEST, RANDOM.integers(0, 100, N)),
    "one far below": np.where(np.arange(N) == 3, 0, LARGEST - RANDOM.integers(0, 100, N)),
    "a third is missing": np.where(np.arange(N) % 3 == 0, -1, RANDOM.integers(0, LARGEST, N)),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("keep", [1, 5, 100, 170])
def test_any_list(name, keep):
    numbers = LISTS[name]
    kept, reached = best(numbers, keep)
    assert kept == by_rank(numbers, keep)
    assert (numbers[kept] >= reached).all()


def test_everything_fits():
    assert best(LISTS["few values"], N)[0] == list(range(N))


def test_from_a_bound_that_is_known():
    """As the second selection starts: at least as many reach it, and it need not be one of them."""
    numbers = LISTS["as scores"]
    tenth = int(np.sort(numbers)[-10])
    assert best(numbers, 5, low=tenth - 1) == best(numbers, 5, low=tenth)
    assert best(numbers, 10, low=tenth)[0] == by_rank(numbers, 10)
