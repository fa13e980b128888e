# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows are in host memory, as the worker's generic code meets them.

Apart from the model's package, because this is imported for every model.
"""

from typing import Any


def pages_to_zero(layer: Any) -> Any:
    """The cache of ``layer`` that new blocks are zeroed in; None where it is in host memory.

    Upstream zeroes blocks that change hands, for layers that may read what they did not
    write. Rows of K/V are read only once written, and zeroing would send them all over PCIe.
    """
    return None if getattr(layer, "host_memory", None) is not None else layer.kv_cache
