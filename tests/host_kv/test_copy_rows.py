"""The kernel that copies listed rows, run by the interpreter; it moves words and computes nothing."""

from __future__ import annotations

import pytest
import torch

from vllm.models.qwen4_exp.qsa.host_kv.copy_rows import copy_rows_reference, launch_copy_rows
from vllm.triton_utils import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, interpreted on the CPU")


@pytest.mark.parametrize(
    ("row_bytes", "size", "begin", "rows"),
    [
        (64, 0, 0, 4),  # nothing at all
        (1040, 3, 0, 4),  # words that are no power of two, fewer rows than programs
        (64, 40, 0, 32),  # a full section, more rows than programs
        (64, 40, 32, 32),  # what is left
        (64, 40, 64, 32),  # beyond the end
    ],
)
def test_the_kernel_copies_what_the_reference_copies(row_bytes, size, begin, rows):
    torch.manual_seed(size + begin)
    host = torch.randint(0, 256, (200, row_bytes), dtype=torch.uint8)
    # Beyond the size the list holds anything.
    slots = torch.full((130 + 64,), 2**30, dtype=torch.int32)
    slots[:size] = torch.randperm(200)[:size].sort().values
    expected = torch.full((rows, row_bytes), 7, dtype=torch.uint8)
    copied = expected.clone()
    count = torch.tensor(size, dtype=torch.int32)
    copy_rows_reference(host, slots, count, begin, expected)
    launch_copy_rows(host, slots, count, begin, copied)
    assert torch.equal(copied, expected)
    assert (copied[max(0, size - begin) :] == 7).all()
