# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over the rows that the indexer selected, on the GPU."""

import math

import torch

from vllm.triton_utils import triton

from .joining import PART, join_kernel, split_states
from .kernels import row_kernel, split_kernel
from .launch import Rows, check_queries, check_selection, gate_of, require, rows_of
from .places import placed
from .tiles import Tile, tile_for

# tl.dot has no smaller matrix.
LEAST_GROUP = 16


def score_scale(dim: int, k_scale: float) -> float:
    """By which products of queries and stored keys become scores, in units of log2."""
    return dim**-0.5 * k_scale * math.log2(math.e)


def sizes(rows: Rows, group: int, dim: int, width: int, tile: Tile) -> dict[str, object]:
    """Compile-time arguments that all kernels over ``rows`` share.

    Fusing multiplications into additions is off: where it is written out (``fma``) it
    happens, elsewhere it would be up to the compiler, kernel by kernel.
    """
    return {
        "FORM": rows.form.name,
        "LAYOUT": rows.layout,
        "WIDTH": width,
        "GROUP": group,
        "BLOCK_M": max(LEAST_GROUP, triton.next_power_of_2(group)),
        "DIM": dim,
        "BLOCK_N": tile.block_n,
        "SPLIT": tile.split,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
        "maxnreg": tile.registers,
    }


def _ends(gate: torch.Tensor, out: torch.Tensor) -> tuple:
    return gate, gate.stride(0), gate.stride(1), out, out.stride(0), out.stride(1)


def sparse_paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, block_table: torch.Tensor,
    token_to_req: torch.Tensor, out: torch.Tensor, *, output_gate: torch.Tensor,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None, k_scale: float = 1.0,
    v_scale: float = 1.0, prefill: bool, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Softmax attention over selected tokens, then the sigmoid output gate.

    Args:
        q: ``[rows, heads, dim]`` bf16.
        keys, values: ``[blocks, block_size, kv_heads, dim]`` as ``formats.views`` gives
            them: bf16, e4m3 bytes or int8, with any strides between blocks and tokens,
            the same for keys, values and scales; device memory, or host memory that the
            device sees.
        selected: ``[rows, width + 1]`` int32, positions in the request, packed to the
            left; the last column is how many there are.
        block_table: ``[requests, blocks per request]`` int32.  An entry that is no block
            of the cache (-1) takes its tokens out of the softmax.
        token_to_req: ``[rows]`` int32; a row of no request (-1) becomes zero.
        out: ``[rows, heads, dim]``, written and returned.
        output_gate: values for ``[rows, heads, dim]``, before the sigmoid.
        key_scales, value_scales: ``[blocks, block_size, kv_heads]`` fp32, of int8 rows.
        k_scale, v_scale: of the layer, for fp8 rows.
        prefill: one program a row and K/V head, rather than one a split and then a
            join.  The result is the same, bit for bit; the first is for many rows.
        tile: None takes the table's.

    Rows without a selected token come out as zeros.  Raises WrongInput where tensors do
    not fit, NoTiles on a GPU below sm_80.

    """
    rows = rows_of(keys, values, key_scales, value_scales)
    kv_heads, dim = keys.shape[2:]
    group = check_queries(q, kv_heads, dim)
    width = check_selection(q.shape[0], selected, block_table, token_to_req)
    require(out.shape == q.shape, "shape of out", tuple(q.shape), tuple(out.shape))
    gate = gate_of(output_gate, out)
    if not q.shape[0]:
        return out
    tile = tile or tile_for(rows.form, q.device)
    shared = sizes(rows, group, dim, width, tile)
    kv = rows.keys, rows.values, rows.key_scales, rows.value_scales
    scale, requests = score_scale(dim, k_scale), block_table.shape[0]
    if prefill:
        for part, places in placed(rows, selected, block_table, token_to_req, tile.block_n):
            row_kernel[(len(places), kv_heads)](
                q[part], q.stride(0), q.stride(1), *kv, places, selected[part], token_to_req[part],
                None, None, None, None, *_ends(gate[part], out[part]), scale, v_scale, requests,
                **shared, PLACES=places.shape[1], STAGES=tile.prefill_stages, num_stages=tile.prefill_stages,
            )  # fmt: skip
        return out
    splits, joined = triton.cdiv(width, tile.split), min(PART, dim)
    for part, *states in split_states(*q.shape[:2], splits, dim, q.device):
        of_rows = selected[part], token_to_req[part]
        split_kernel[(len(states[0]), kv_heads, splits)](
            q[part], q.stride(0), q.stride(1), *kv, of_rows[0], block_table, block_table.stride(0), of_rows[1], *states,
            scale, requests, rows.blocks, block_table.shape[1],
            **shared, STAGES=tile.decode_stages, num_stages=tile.decode_stages,
        )  # fmt: skip
        join_kernel[(len(states[0]), q.shape[1], dim // joined)](
            *states, *of_rows, *_ends(gate[part], out[part]), v_scale, requests,
            FORM=rows.form.name, WIDTH=width, HEADS=q.shape[1], DIM=dim, PART=joined, SPLIT=tile.split, SPLITS=splits,
            LANES=triton.next_power_of_2(splits), num_warps=1, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
