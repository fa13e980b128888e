# SPDX-License-Identifier: Apache-2.0
"""Rows listed by number, copied from host memory into a section.

A kernel and not a copy engine, because the list is on the device: an engine would need the
host to read it first. Few programs are enough to fill PCIe (about 40 KB in flight), and
leave the rest of the GPU to the attention that runs beside it.
"""

import torch

from vllm.triton_utils import tl, triton

# Enough for 25 GB/s at 2 microseconds, and a third of the 82 multiprocessors of an RTX 3090.
PROGRAMS = 28


@triton.jit(do_not_specialize=["begin", "rows"])
def _copy_rows_kernel(
    host_ptr,
    slots_ptr,
    size_ptr,
    out_ptr,
    begin,
    rows,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    last = tl.minimum(tl.load(size_ptr) - begin, rows)
    words = tl.arange(0, BLOCK)
    inside = words < WORDS
    for row in range(tl.program_id(0), last, PROGRAMS):
        slot = tl.load(slots_ptr + begin + row).to(tl.int64)
        content = tl.load(host_ptr + slot * WORDS + words, mask=inside)
        tl.store(out_ptr + row * WORDS + words, content, mask=inside)


def copy_rows_reference(
    host: torch.Tensor, slots: torch.Tensor, size: torch.Tensor, begin: int, out: torch.Tensor
) -> None:
    """Fill ``out`` with the rows ``slots[begin : begin + len(out)]`` that exist, in place.

    Args:
        host: ``[pool, row_bytes]`` uint8.
        slots: int32 rows of ``host``, of which the first ``size`` are meant.
        size: ``[]`` int32.
        begin: first entry of ``slots``.
        out: ``[rows, row_bytes]`` uint8; rows beyond ``size`` keep what they hold.

    """
    count = max(0, min(int(size) - begin, out.shape[0]))
    torch.index_select(host, 0, slots[begin : begin + count].long(), out=out[:count])


def copy_rows(host: torch.Tensor, slots: torch.Tensor, size: torch.Tensor, begin: int, out: torch.Tensor) -> None:
    """As ``copy_rows_reference``, queued on the current stream where ``out`` is on a GPU.

    A row's bytes are a multiple of 4.
    """
    if out.device.type == "cpu":
        copy_rows_reference(host, slots, size, begin, out)
        return
    launch_copy_rows(host, slots, size, begin, out)


def launch_copy_rows(host, slots, size, begin: int, out) -> None:
    """The kernel itself."""
    words = out.shape[1] // 4
    _copy_rows_kernel[(PROGRAMS,)](
        host.view(torch.int32),
        slots,
        size,
        out.view(torch.int32),
        begin,
        out.shape[0],
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        PROGRAMS=PROGRAMS,
        num_warps=4,
    )
