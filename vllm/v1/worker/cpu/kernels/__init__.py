# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner's own small kernels in numpy, for CPUs where Triton is interpreted.

The runner launches about fifteen Triton kernels a step to fill inputs, move recurrent
state and sample.  Triton's interpreter spends milliseconds on each of their programs:
150 ms a step for eight layers, more than the model takes.  The functions here compute
the same bytes in microseconds.  One file per subject:

====================  ==========================================================
``memory.py``         memory behind the addresses that kernels get as integers
``block_tables.py``   block tables, slot mappings, cleared K/V blocks
``inputs.py``         token ids, positions, sequence lengths of a step
``results.py``        what a step's sampled tokens change in the request states
``state_blocks.py``   the copy of one block of recurrent state
``mamba_align.py``    when recurrent state moves between blocks (prefix caching)
``gumbel.py``         the sampler's noise and its argmax
``logits.py``         temperature, min-p, penalties, log-probabilities
``registry.py``       which kernel each function stands in for
====================  ==========================================================

Where a kernel could read or write out of bounds, these raise ``IndexError`` instead.
"""

from .registry import replace_interpreted_kernels

__all__ = ["replace_interpreted_kernels"]
