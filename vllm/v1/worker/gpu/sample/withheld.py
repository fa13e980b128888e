# SPDX-License-Identifier: Apache-2.0
"""No token is sampled from logits that hold a NaN or an infinity.

The counts of such logits travel to the scheduler with the sampled tokens, in the copy that there is anyway; what the
scheduler makes of them is in `v1/core/sched/damaged_requests.py`. Until it hears of it, the next step of the request
may run, on other stages too, and must not go on from a token that never was one: upstream's sampler makes 1023 of
NaNs, the end of its kernel's first block, and other samplers promise nothing. So the step counts as one that sampled
nothing, as a chunk of a prompt does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.output import SamplerOutput


def withhold(output: SamplerOutput, cu_num_logits: torch.Tensor) -> None:
    """Take back what was sampled from damaged logits, in place. Waits for no device.

    Args:
        output: its `num_nans` is `[logits]` or `[requests]`, how many of each row, and becomes `[requests]`; None where
            nobody counts. `num_sampled`, `[requests]`, becomes 0 where there are any.
        cu_num_logits: `[requests + 1]`, rows of each request; with drafts a request has several
    """
    damaged = output.num_nans
    if damaged is None:
        return
    if damaged.shape != output.num_sampled.shape:
        # Upstream would hand rows to the scheduler as if they were requests.
        ends = torch.nn.functional.pad(damaged.cumsum(0, dtype=torch.int32), (1, 0))[cu_num_logits.long()]
        damaged = ends[1:] - ends[:-1]
    output.num_nans = damaged
    output.num_sampled = output.num_sampled.masked_fill(damaged > 0, 0)
