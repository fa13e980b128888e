# SPDX-License-Identifier: Apache-2.0
"""Which groups a query reads: scores against compressed keys, then the best ones.

The score of a group is ``sum over index heads of relu(<q_head, key>)``.  It only
ranks, so the constant factor ``1 / sqrt(width)`` of the published model is left out.
Equal scores are ranked by position, the earlier group first, so that a row has one
right answer; ``qsa/select.py`` gives the same one on a GPU.
"""

import torch

_LARGEST = 0x7FFFFFFF


def _request_keys(k_cache: torch.Tensor, pages: torch.Tensor, count: int):
    """First ``count`` compressed keys of a request: ``[count, width]`` float32."""
    page_size = k_cache.shape[1]
    wanted = -(-count // page_size)
    keys = k_cache[pages[:wanted].long()]
    return keys.flatten(0, 1)[:count, 0].float()


def _select(q, k_cache, pages, visible, out) -> None:
    """Fill ``out`` with the best visible groups of one request's query rows.

    ``q`` is ``[rows, heads, width]``, ``visible`` and ``out`` are its rows'.
    Groups ascend in ``out``, unused columns are -1.
    """
    keep = out.shape[1]
    most = int(visible.max()) if visible.numel() else 0
    columns = torch.arange(max(most, keep), device=q.device)
    hidden = columns >= visible.unsqueeze(-1)
    if most <= keep:
        # Everything visible fits the budget: nothing to rank.
        out.copy_(torch.where(hidden, -1, columns)[:, :keep])
        return
    keys = _request_keys(k_cache, pages, most)
    scores = torch.relu(q.float() @ keys.T).sum(1)
    # Bits of what is not negative sort as it does; a NaN comes first, so that the
    # request whose group it is notices.
    ordered = torch.where(scores.isnan(), _LARGEST, scores.view(torch.int32) & _LARGEST)
    ordered.masked_fill_(hidden[:, :most], -1)
    last = ordered.topk(keep, dim=-1).values[:, -1:]
    above, level = ordered > last, ordered == last
    room = keep - above.sum(-1, keepdim=True)
    chosen = (above | (level & (level.cumsum(-1) <= room))).nonzero()[:, 1].view(-1, keep)
    out.copy_(torch.where(chosen < visible.unsqueeze(-1), chosen, -1))


def qsa_select_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, visible_blocks: torch.Tensor,
    token_topk: int, compress_ratio: int, decode_query_len: int, block_indices: torch.Tensor
) -> None:
    """Select for requests that bring ``decode_query_len`` rows each, in order.

    Args:
        q: ``[requests * decode_query_len, heads, width]``, bf16 or e4m3.
        k_cache: ``[pages, page_size, 1, width]`` compressed keys of ``q``'s dtype.
        page_table: ``[requests, pages per request]``.
        visible_blocks: ``[rows]``, complete groups before each row.
        token_topk: tokens that a row may select.
        compress_ratio: tokens in a group.
        decode_query_len: rows of each request.
        block_indices: ``[rows, token_topk / compress_ratio]`` int32, overwritten:
            ascending groups, then -1.

    """
    assert block_indices.shape == (q.shape[0], token_topk // compress_ratio)
    for request, pages in enumerate(page_table):
        rows = slice(request * decode_query_len, (request + 1) * decode_query_len)
        _select(q[rows], k_cache, pages, visible_blocks[rows], block_indices[rows])


def qsa_select_paged_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, query_start_loc: torch.Tensor,
    visible_blocks: torch.Tensor, token_topk: int, compress_ratio: int, max_query_len: int,
    block_indices: torch.Tensor, max_seq_len: int
) -> None:
    """Select for requests of any length.

    As ``qsa_select_paged_decode``, with ``query_start_loc`` ``[requests + 1]``
    giving each request's rows (its first value is the batch row of ``q[0]``).
    ``max_query_len`` and ``max_seq_len`` bound the kernels' work space only.
    """
    del max_query_len, max_seq_len
    assert block_indices.shape == (q.shape[0], token_topk // compress_ratio)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    block_indices[starts[-1] :] = -1
    for request, pages in enumerate(page_table[: len(starts) - 1]):
        rows = slice(starts[request], starts[request + 1])
        _select(q[rows], k_cache, pages, visible_blocks[rows], block_indices[rows])


def expand_qsa_block_indices(
    block_indices: torch.Tensor, query_positions: torch.Tensor, visible_blocks: torch.Tensor,
    compress_ratio: int, token_topk: int, out: torch.Tensor
) -> None:
    """Turn selected groups into token positions and add the open group's tokens.

    Args:
        block_indices: ``[rows, token_topk / compress_ratio]``; the first
            ``min(visible, columns)`` entries of a row are valid.
        query_positions: ``[rows]``, -1 on padding.
        visible_blocks: ``[rows]``.
        compress_ratio: tokens in a group.
        token_topk: tokens that a row may select.
        out: ``[rows, token_topk + compress_ratio]`` int32, overwritten: positions
            packed to the left, -1 behind them, and their number in the last column.

    """
    rows, block_topk = block_indices.shape
    assert out.shape == (rows, token_topk + compress_ratio)
    groups = visible_blocks.long().clamp_max(block_topk)
    selected = groups * compress_ratio
    tail_start = (query_positions + 1) // compress_ratio * compress_ratio
    tail = query_positions + 1 - tail_start
    columns = torch.arange(out.shape[1] - 1, device=out.device)
    within = torch.arange(compress_ratio, device=out.device)
    tokens = (block_indices.long().unsqueeze(-1) * compress_ratio + within).flatten(1)
    tokens = torch.nn.functional.pad(tokens, (0, compress_ratio - 1))
    beyond = columns - selected.unsqueeze(-1)
    tokens = torch.where(beyond < 0, tokens, tail_start.unsqueeze(-1) + beyond)
    out[:, :-1] = torch.where(beyond < tail.unsqueeze(-1), tokens, -1)
    out[:, -1] = selected + tail
