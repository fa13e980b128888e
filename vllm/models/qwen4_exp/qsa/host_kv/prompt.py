# SPDX-License-Identifier: Apache-2.0
"""Attention of many tokens at once over rows in host memory: the loop over sections.

Read by each token on its own, a chunk of a prompt would pull tokens x budget rows through
PCIe. Here every row that the chunk needs crosses once (``union.py``), in sections of half an
arena (``arena.py``), and all tokens use a section before the next (``attend.py``), adding to one
running state (``../softmax.py``), so that memory does not depend on how many there are.
"""

import torch

from ..formats import KVFormat, views
from ..state import State
from .arena import Arena
from .attend import attend, finish
from .lines import by_head, whole_rows
from .union import edges_of_sections, union_of


def section_bound(tokens: int, width: int, contexts: int, pool: int, ratio: int, groups: int) -> int:
    """The most sections that a chunk can need, from what the host knows.

    Args:
        tokens: of the chunk.
        width: rows that one of them selects at most.
        contexts: sum of the contexts of its requests, in tokens, or a bound of it.
        pool: rows in the pool.
        ratio: rows of a group.
        groups: of a section.

    """
    # A token's last group may be open, and a context's too: one more than whole ones.
    of_tokens, of_contexts = tokens * (width // ratio + 1), contexts // ratio + tokens
    return -(-min(of_tokens, of_contexts, pool // ratio) // groups)


def prompt_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    form: KVFormat,
    selected: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    ratio: int,
    contexts: int,
    arena: Arena,
    out: torch.Tensor,
    *,
    output_gate: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Sparse attention as ``sparse_paged_attention`` computes it, with every row read once.

    Args:
        q: ``[rows, heads, width]``.
        kv_cache: ``[blocks, kv_heads, block_size, content]`` over host memory, a token's heads side by side.
        form: how it is stored.
        selected: ``[rows, budget + ratio]`` int32 positions, packed to the left, their number in the last column.
        block_table: ``[requests, blocks per request]``.
        token_to_req: ``[rows]``.
        ratio: tokens that share a pooled key, which are selected together.
        contexts: bound of the sum of contexts that the rows are of.
        arena: on the device of ``q``.
        out: ``[rows, heads, width]``, written and returned.
        output_gate: for every output, before the sigmoid.
        k_scale, v_scale: of an fp8 cache.

    """
    blocks, kv_heads, block_size, content = kv_cache.shape
    host = whole_rows(kv_cache)
    row_bytes, pool = host.shape[2], blocks * block_size // ratio
    host = host.view(pool, ratio * row_bytes)
    halves = arena.halves(ratio * row_bytes)
    groups = halves.shape[1]
    count = section_bound(q.shape[0], selected.shape[1] - 1, contexts, blocks * block_size, ratio, groups)
    union = union_of(selected, block_table, token_to_req, block_size, pool, count * groups, ratio)
    if q.device.type == "cpu":
        # Nothing is queued here: empty sections cost their time, and asking costs none. A bound that is none would cost a
        # GPU rows without a word.
        needed = -(-int(union.size) // groups)
        assert needed <= count, f"{needed} sections are needed, and {count} were foreseen"
        count = needed
    # To a kernel the union is one request whose blocks are sections, of which the arena has two. The table is as wide
    # as sections of the whole pool, so that its stride, which Triton compiles for, is always the same.
    section = groups * ratio
    table = torch.arange(-(-pool // groups), dtype=torch.int32, device=q.device).remainder_(2).unsqueeze(0)
    zeros = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    rows = views(by_head(halves.view(2, section, row_bytes), kv_heads, content, form.dtype), form, q.shape[-1])
    edges = edges_of_sections(union.numbers, section, count)
    state = State.empty(*q.shape, q.device)
    for index in arena.sections(host, union.groups, union.size, count):
        attend(state, q, rows, union.numbers, edges[index], table, zeros, k_scale)
    return finish(state, out, output_gate, v_scale)
