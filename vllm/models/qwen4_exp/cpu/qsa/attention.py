# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over the rows that the indexer selected."""

import torch

# Gathered K and V of one pass, in float32: bounds the memory of a long prefill.
_PASS_BYTES = 64 << 20


def _rows(cache: torch.Tensor, scales: torch.Tensor | None, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows of a cache as float32 ``[rows, kv_heads, selected, width]``, by block and offset ``[rows, selected]``."""
    rows = cache[at]
    # e4m3 is stored as bytes.
    rows = rows.view(torch.float8_e4m3fn).float() if rows.dtype == torch.uint8 else rows.float()
    if scales is not None:
        rows = rows * scales[at].unsqueeze(-1)
    return rows.transpose(1, 2)


def sparse_paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, block_table: torch.Tensor,
    token_to_req: torch.Tensor, out: torch.Tensor, *, output_gate: torch.Tensor, key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, prefill: bool = True
) -> torch.Tensor:
    """Softmax attention over selected tokens, then the sigmoid output gate.

    Args:
        q: ``[rows, heads, width]``.
        keys, values: ``[blocks, block_size, kv_heads, width]``: bf16, int8, or e4m3 bytes as uint8.
        selected: ``[rows, most + 1]`` int32 positions in the request, packed to the left; the last column is how many
            there are.
        block_table: ``[requests, blocks per request]``.
        token_to_req: ``[rows]``.
        out: ``[rows, heads, width]``, written and returned.
        output_gate: values for ``[rows, heads, width]``, before the sigmoid.
        key_scales, value_scales: ``[blocks, block_size, kv_heads]`` float32, of each row; None where rows have none.
        k_scale, v_scale: of all of them.
        prefill: picks tiles in the kernel; no effect here.

    Rows without a selected token come out as zeros.

    """
    del prefill
    rows, heads, width = q.shape
    block_size, kv_heads = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} K/V heads")
    gate = torch.sigmoid(output_gate.reshape(q.shape).float())
    scale = width**-0.5 * k_scale
    counts = selected[:, -1]
    most = int(counts.max()) if rows else 0
    per_row = max(1, most) * kv_heads * width * 2 * 4
    step = max(1, _PASS_BYTES // per_row)
    for begin in range(0, rows, step):
        part = slice(begin, min(rows, begin + step))
        tokens = selected[part, :most].long()
        valid = torch.arange(most, device=q.device) < counts[part].unsqueeze(-1)
        tokens = torch.where(valid, tokens, 0)
        request = token_to_req[part].long().unsqueeze(-1)
        block = block_table[request, tokens // block_size].long()
        k = _rows(keys, key_scales, (block, tokens % block_size))
        v = _rows(values, value_scales, (block, tokens % block_size))
        query = q[part].float().unflatten(1, (kv_heads, -1))
        scores = query @ k.transpose(-1, -2) * scale
        scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        # A row that selects nothing gathers row 0 of the cache, which may hold
        # anything: 0 * NaN would leak it.
        v = v.masked_fill(~valid[:, None, :, None], 0.0)
        mixed = (weights @ v).flatten(1, 2) * v_scale
        # The published model rounds before it gates.
        out[part] = (mixed.to(out.dtype).float() * gate[part]).to(out.dtype)
    return out
