# SPDX-License-Identifier: Apache-2.0
"""Attention over a context that is never in one place: section after section.

Where K/V lie in host memory, a prompt's chunk reads them in sections: some blocks are
copied to the GPU, all rows of the chunk attend to what they selected there, the next
blocks take their place.  What a row has seen is its ``State``, of fixed size:

    state.clear()
    for section in sections:                  # block_table: -1 for blocks elsewhere
        columns = section_columns(selected, section.first, section.last)
        attend_section(state, q, keys, values, selected, columns, table, token_to_req)
    finish(state, out, output_gate=gate)

The result equals that of ``sparse_paged_attention`` but for rounding: joins fall between
other columns.  It depends on the row and on where its request's sections begin, and on
nothing else in the batch.
"""

import torch

from .attention import score_scale, sizes
from .kernels import finish_kernel, row_kernel
from .launch import check_queries, check_selection, gate_of, require, rows_of
from .places import placed
from .state import State
from .tiles import Tile, tile_for

__all__ = ["State", "attend_section", "finish", "section_columns"]


def section_columns(selected: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Columns of ``selected`` whose tokens are in ``first`` to ``last``, the latter not included.

    Args:
        selected: ``[rows, width + 1]`` int32, each list ascending, the count in the end.
        first, last: positions in the request.

    Returns ``[rows, 2]`` int32: the first such column, and the one after the last.

    """
    counts = selected[:, -1:].clamp(max=selected.shape[1] - 1)
    tokens, place = selected[:, :-1], torch.arange(selected.shape[1] - 1, device=selected.device)
    listed = place < counts
    edges = [(listed & (tokens < edge)).sum(1, dtype=torch.int32) for edge in (first, last)]
    return torch.stack(edges, 1)


def _check_state(state: State, rows: int, heads: int, dim: int) -> None:
    for what, tensor, shape in zip(State._fields, state, ((rows, heads, dim), (rows, heads), (rows, heads))):
        require(tensor.shape == shape, f"shape of the state's {what}", shape, tuple(tensor.shape))
        require(tensor.dtype == torch.float32, f"dtype of the state's {what}", torch.float32, tensor.dtype)
        require(tensor.is_contiguous(), f"strides of the state's {what}", "contiguous", tensor.stride())


def attend_section(
    state: State, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor,
    columns: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, *,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None, k_scale: float = 1.0,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Add to ``state`` what each row selected in one section.

    Args:
        state: of the rows so far; updated in place.  Rows without columns here are
            neither read nor written.
        keys, values: what the section's blocks hold; the whole arena.
        columns: ``[rows, 2]`` int32, which of the row's columns are in this section:
            the first, and the one after the last; ``section_columns`` if lists ascend.
        block_table: ``[requests, blocks per request]``, from a request's block to one
            of the arena; -1 where it is not there.  Tokens of such blocks do not count.

    The rest, and what is raised, as in ``attention.sparse_paged_attention``.

    """
    rows = rows_of(keys, values, key_scales, value_scales)
    kv_heads, dim = keys.shape[2:]
    group = check_queries(q, kv_heads, dim)
    width = check_selection(q.shape[0], selected, block_table, token_to_req)
    _check_state(state, *q.shape)
    require(columns.shape == (q.shape[0], 2), "columns", (q.shape[0], 2), tuple(columns.shape))
    require(columns.dtype == torch.int32, "dtype of columns", torch.int32, columns.dtype)
    require(columns.is_contiguous(), "strides of columns", "contiguous", columns.stride())
    if not q.shape[0]:
        return
    tile = tile or tile_for(rows.form, q.device)
    for part, places in placed(rows, selected, block_table, token_to_req, tile.block_n, columns):
        row_kernel[(len(places), kv_heads)](
            q[part], q.stride(0), q.stride(1), rows.keys, rows.values, rows.key_scales, rows.value_scales, places,
            selected[part], token_to_req[part], columns[part], *(tensor[part] for tensor in state),
            None, 0, 0, None, 0, 0, score_scale(dim, k_scale), 1.0, block_table.shape[0],
            **sizes(rows, group, dim, width, tile), PLACES=places.shape[1], STAGES=tile.prefill_stages,
            num_stages=tile.prefill_stages,
        )  # fmt: skip


def finish(state: State, out: torch.Tensor, *, output_gate: torch.Tensor, v_scale: float = 1.0) -> torch.Tensor:
    """The gated result of all that ``state`` has seen.

    Args:
        out: ``[rows, heads, dim]``, written and returned.
        output_gate: values for that shape, before the sigmoid.
        v_scale: the layer's, for fp8 rows.

    """
    _check_state(state, *out.shape)
    gate = gate_of(output_gate, out)
    if out.shape[0]:
        finish_kernel[out.shape[:2]](
            state.accumulator, state.normaliser, gate, gate.stride(0), gate.stride(1), out, out.stride(0),
            out.stride(1), v_scale, DIM=out.shape[2], num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out
