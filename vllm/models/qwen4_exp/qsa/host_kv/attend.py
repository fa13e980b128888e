# SPDX-License-Identifier: Apache-2.0
"""One section's share of attention, by the kernel or by the reference."""

import torch

from .. import reference
from ..formats import KVViews
from ..state import State

# Gathered K and V of one pass of the reference, in float32.
_PASS_BYTES = 64 << 20


def attend(
    state: State, q: torch.Tensor, rows: KVViews, numbers: torch.Tensor, columns: torch.Tensor, table: torch.Tensor,
    zeros: torch.Tensor, k_scale: float
) -> None:  # fmt: skip
    """``sections.attend_section`` on a GPU, the same in plain torch elsewhere.

    Args:
        state: of the tokens so far; updated in place.
        q: ``[tokens, heads, dim]``.
        rows: the arena, whose blocks are its halves.
        numbers: of a ``Union``, which stand for positions of one request.
        columns: ``[tokens, 2]`` int32, of this section.
        table: ``[1, sections]`` int32, from a section to its half.
        zeros: ``[tokens]`` int32, because all of them are of that request.
        k_scale: of fp8 rows.

    """
    scales = {"key_scales": rows.key_scales, "value_scales": rows.value_scales, "k_scale": k_scale}
    if q.device.type != "cpu":
        from ..sections import attend_section

        attend_section(state, q, rows.keys, rows.values, numbers, columns, table, zeros, **scales)
        return
    # The reference gathers every column that it is given, so it gets those that some token has here, for as many
    # tokens at a time as bound what it gathers.
    mine = (columns[:, 1] > columns[:, 0]).nonzero().flatten()
    if not len(mine):
        return
    low, high = int(columns[mine, 0].min()), int(columns[mine, 1].max())
    step = max(1, _PASS_BYTES // (2 * 4 * (high - low) * rows.keys.shape[2] * q.shape[2]))
    for begin in range(0, q.shape[0], step):
        some = slice(begin, begin + step)
        few = torch.nn.functional.pad(numbers[some, low:high], (0, 1), value=high - low)
        part = state.rows(some)
        reference.attend_section(
            part, q[some], rows.keys, rows.values, few, columns[some] - low, table, zeros[some], **scales
        )


def finish(state: State, out: torch.Tensor, output_gate: torch.Tensor, v_scale: float) -> torch.Tensor:
    """``sections.finish``, or the same in plain torch."""
    if out.device.type == "cpu":
        return reference.finish(state, out, output_gate=output_gate, v_scale=v_scale)
    from .. import sections

    return sections.finish(state, out, output_gate=output_gate, v_scale=v_scale)
