# SPDX-License-Identifier: Apache-2.0
"""Keys and values into a layer's paged cache, quantized as they are written.

One program owns one token and head, holds its ``head_dim`` numbers in registers and
stores them once.

    checks.py         what does not fit, and is refused
    reference.py      both writers in plain torch
    stored.py         a row as bf16, e4m3 or int8, in its slot
    rows.py           ``write_rows``: keys and values that are ready
    packed_kernel.py  the packed projection: norms, rotation, gate and cache by one kernel
    packed.py         ``norm_rope_gate_write``: its launch, also as a part of another one
"""

from .packed import PackedLaunch, norm_rope_gate_write, packed_launch
from .packed_kernel import norm_rope_gate_write_kernel
from .rows import write_rows

__all__ = ["PackedLaunch", "norm_rope_gate_write", "norm_rope_gate_write_kernel", "packed_launch", "write_rows"]
