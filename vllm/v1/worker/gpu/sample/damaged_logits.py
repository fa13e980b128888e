# SPDX-License-Identifier: Apache-2.0
"""How many logits of each row are no basis for sampling: NaN or +infinity.

-infinity is none of them: masks of grammars and forbidden words put it there, before this is asked.
"""

import torch

from vllm.triton_utils import tl, triton

#: Logits that one program looks at. 31 programs share a row of 248,320; together they read it in a few microseconds.
_PART = 8192


@triton.jit
def _count_kernel(logits_ptr, counts_ptr, stride, vocab_size, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    logits = tl.load(logits_ptr + row * stride + at, mask=at < vocab_size, other=0.0).to(tl.float32)
    # No comparison with a NaN holds.
    damaged = tl.sum(((logits < float("inf")) == 0).to(tl.int32), axis=0)
    if damaged > 0:
        tl.atomic_add(counts_ptr + row, damaged)


def count_damaged(logits: torch.Tensor) -> torch.Tensor:
    """`[rows, vocabulary]` logits, rows lying together -> int32 `[rows]`. Waits for no device."""
    if not logits.is_cuda:
        return (~(logits < torch.inf)).sum(-1, dtype=torch.int32)
    counts = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
    count(logits, counts)
    return counts


def count(logits: torch.Tensor, counts: torch.Tensor) -> None:
    """Add each row's damaged logits to `counts`."""
    rows, vocab_size = logits.shape
    _count_kernel[(rows, triton.cdiv(vocab_size, _PART))](logits, counts, logits.stride(0), vocab_size, PART=_PART)
