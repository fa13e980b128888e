# SPDX-License-Identifier: Apache-2.0
"""Corrected JSON beside links to the same weights.

    plan.py        which documents change, and what is said of each change
    config.py      keys at the wrong level, old names, the layer of the n-gram table
    groups.py      quantization groups by what the tensors are
    index.py       the index, from the headers
    write.py       the new directory; nothing is ever written into the old one

What cannot be repaired shows when the new directory is checked: see `repair`.
"""

from vllm.ampere.repair.write import Repair, RepairError, repair

__all__ = ["Repair", "RepairError", "repair"]
