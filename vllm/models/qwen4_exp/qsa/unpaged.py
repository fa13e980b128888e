# SPDX-License-Identifier: Apache-2.0
"""Keys of a prompt side by side: copied once for all tiles of rows that score them.

Every tile of rows reads all keys that it sees.  In their pages, the address of each waits for its page's number, and
keys of e4m3 would be decoded again for every tile, into registers: a warp group's product with numbers from registers
takes an H200 1.7 times as long as one from shared memory.  Side by side, e4m3 as fp16, keys go to shared memory as they
are and are multiplied from there.  The copy reads a key and writes 256 bytes, as much as a score in each of 64 rows.

It lies at the beginning of the work space that scores lie in.
"""

import torch

from vllm.triton_utils import tl, triton

from .e4m3 import SCALE
from .index_keys import in_halves, words

# Rows of a request, on average, from which on the copy pays: four tiles of them.
LEAST_ROWS = 128
# Of the work space, so that the copy leaves room for scores.
_PART = 2
_KEYS = 64
_VISIBLE_AT_ONCE = 1024


# As in score.py: no kernel for each alignment of these.
@triton.jit(
    do_not_specialize=["page_table_width"],
    do_not_specialize_on_alignment=["page_table_ptr", "query_start_ptr", "visible_ptr"],
)
def _copy_kernel(
    k_cache_ptr,
    page_table_ptr,
    query_start_ptr,
    visible_ptr,
    out_ptr,
    stride_cache_page,
    stride_cache_token,
    stride_table,
    stride_out,
    page_table_width,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET: tl.constexpr,
    KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KEYS
    start = tl.load(query_start_ptr)
    begin = tl.load(query_start_ptr + request) - start
    end = tl.load(query_start_ptr + request + 1) - start
    most = 0
    for row in tl.range(begin, end, AT_ONCE):
        row += tl.arange(0, AT_ONCE)
        most = tl.maximum(most, tl.max(tl.load(visible_ptr + row, mask=row < end, other=0), axis=0))
    # Pages of what no row sees may be anything.
    if (most <= BUDGET) | (first >= most):
        return
    column = first + tl.arange(0, KEYS)
    live = column < most
    page = tl.load(
        page_table_ptr + request * stride_table + tl.minimum(column // PAGE, page_table_width - 1), mask=live, other=0
    )
    base = k_cache_ptr + page.to(tl.int64) * stride_cache_page + column % PAGE * stride_cache_token
    # Words of four numbers of e4m3, or numbers of bf16.
    FOUR: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.int32
    place = tl.arange(0, WIDTH // 4 if FOUR else WIDTH)
    FILLED: tl.constexpr = DIM // 4 if FOUR else DIM
    key = tl.load(base[:, None] + place[None, :], mask=live[:, None] & (place < FILLED)[None, :], other=0)
    if FOUR:
        key = in_halves(key)
    at = out_ptr + request * stride_out + column[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, key, mask=live[:, None])


def width_of(dim: int) -> int:
    """Numbers of a copied key: the matrix units take 16 at a time."""
    return max(16, triton.next_power_of_2(dim))


def copy_words(requests: int, columns: int, dim: int) -> int:
    """int32 words that the copy takes of the work space."""
    return requests * columns * width_of(dim) // 2


def pays(rows: int, requests: int, columns: int, dim: int, room: int) -> bool:
    """Whether a prompt's keys are copied before they are scored, in a work space of ``room`` words."""
    return rows >= LEAST_ROWS * requests and _PART * copy_words(requests, columns, dim) <= room


def unpaged_reference(
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    visible: torch.Tensor,
    columns: int,
    budget: int,
    space: torch.Tensor,
) -> torch.Tensor:
    """``unpaged`` in plain torch."""
    out = _place_of_copy(k_cache, page_table.shape[0], columns, space)
    bounds = (query_start_loc - query_start_loc[0]).tolist()
    for request, rows in enumerate(visible[begin:end] for begin, end in zip(bounds, bounds[1:])):
        most = int(rows.max()) if len(rows) else 0
        if most <= budget:
            continue
        group = torch.arange(most, device=k_cache.device)
        page = page_table[request, group // k_cache.shape[1]].long()
        keys = k_cache[page, group % k_cache.shape[1], 0].float()
        if k_cache.dtype is torch.float8_e4m3fn:
            keys = torch.cat((keys[:, 0::2], keys[:, 1::2]), dim=1) * SCALE
        out[request, :most] = torch.nn.functional.pad(keys, (0, out.shape[2] - keys.shape[1])).to(out.dtype)
    return out


def _place_of_copy(k_cache: torch.Tensor, requests: int, columns: int, space: torch.Tensor) -> torch.Tensor:
    """``[requests, columns, width_of(dim)]`` at the beginning of ``space``."""
    dim = k_cache.shape[3]
    dtype = torch.float16 if k_cache.dtype is torch.float8_e4m3fn else k_cache.dtype
    return space[: copy_words(requests, columns, dim)].view(dtype).view(requests, columns, width_of(dim))


def unpaged(
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    visible: torch.Tensor,
    columns: int,
    budget: int,
    space: torch.Tensor,
) -> torch.Tensor:
    """Copy the keys that rows of each request see to the beginning of ``space``.

    Args:
        k_cache: ``[pages, page_size, 1, dim]``, bf16 or e4m3.
        page_table: ``[requests, pages per request]``.
        query_start_loc: ``[requests + 1]``.
        visible: ``[rows]`` int32.
        columns: places for keys of each request, at least as many as a row sees; whole tiles of keys.
        budget: requests whose rows see no more than this are left out.
        space: int32, ``copy_words`` or more.

    Returns ``[requests, columns, width_of(dim)]``, bf16, or fp16 as ``in_halves`` has it.  What no row sees is not
    written.

    """
    requests, codes = page_table.shape[0], words(k_cache)
    out = _place_of_copy(k_cache, requests, columns, space)
    _copy_kernel[(requests, triton.cdiv(columns, _KEYS))](
        codes,
        page_table,
        query_start_loc,
        visible,
        out,
        *codes.stride()[:2],
        page_table.stride(0),
        out.stride(0),
        page_table.shape[1],
        PAGE=k_cache.shape[1],
        DIM=k_cache.shape[3],
        WIDTH=out.shape[2],
        BUDGET=budget,
        KEYS=_KEYS,
        AT_ONCE=_VISIBLE_AT_ONCE,
        num_warps=4,
    )
    return out
