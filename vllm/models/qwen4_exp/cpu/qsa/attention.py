# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over the rows that the indexer selected."""

import torch

# Gathered K and V of one pass, in float32: bounds the memory of a long prefill.
_PASS_BYTES = 64 << 20


def _dequantized(cache: torch.Tensor) -> torch.Tensor:
    """e4m3 caches are stored as bytes; everything else is a float already."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def qsa_sparse_paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, logical_indices: torch.Tensor,
    block_table: torch.Tensor, token_to_req: torch.Tensor, use_prefill_config: bool,
    out: torch.Tensor | None = None, k_scale: float | None = None, v_scale: float | None = None, *,
    output_gate: torch.Tensor
) -> torch.Tensor:
    """Softmax attention over selected tokens, then the sigmoid output gate.

    Args:
        q: ``[rows, heads, width]``.
        k_cache, v_cache: ``[blocks, block_size, kv_heads, width]``: bf16, e4m3, or
            e4m3 bytes as uint8.
        logical_indices: ``[rows, selected + 1]`` int32 positions in the request,
            packed to the left; the last column is how many there are.
        block_table: ``[requests, blocks per request]``.
        token_to_req: ``[rows]``.
        use_prefill_config: picks a tile table in the kernel; no effect here.
        out: ``[rows, heads, width]``, written and returned; None makes a new one.
        k_scale, v_scale: of an e4m3 cache; one where None.
        output_gate: values for ``[rows, heads, width]``, before the sigmoid.

    Rows without a selected token come out as zeros.

    """
    del use_prefill_config
    rows, heads, width = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} K/V heads")
    out = torch.empty_like(q) if out is None else out
    gate = torch.sigmoid(output_gate.reshape(q.shape).float())
    scale = width**-0.5 * (1.0 if k_scale is None else k_scale)
    keys, values = _dequantized(k_cache), _dequantized(v_cache)
    counts = logical_indices[:, -1]
    most = int(counts.max()) if rows else 0
    per_row = max(1, most) * kv_heads * width * 2 * 4
    step = max(1, _PASS_BYTES // per_row)
    for begin in range(0, rows, step):
        part = slice(begin, min(rows, begin + step))
        tokens = logical_indices[part, :most].long()
        valid = torch.arange(most, device=q.device) < counts[part].unsqueeze(-1)
        tokens = torch.where(valid, tokens, 0)
        request = token_to_req[part].long().unsqueeze(-1)
        block = block_table[request, tokens // block_size].long()
        # [rows, kv_heads, selected, width]
        k = keys[block, tokens % block_size].float().transpose(1, 2)
        v = values[block, tokens % block_size].float().transpose(1, 2)
        query = q[part].float().unflatten(1, (kv_heads, -1))
        scores = query @ k.transpose(-1, -2) * scale
        scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        # A row that selects nothing gathers row 0 of the cache, which may hold
        # anything: 0 * NaN would leak it.
        v = v.masked_fill(~valid[:, None, :, None], 0.0)
        mixed = (weights @ v).flatten(1, 2) * (1.0 if v_scale is None else v_scale)
        # The published model rounds before it gates.
        out[part] = (mixed.to(out.dtype).float() * gate[part]).to(out.dtype)
    return out
