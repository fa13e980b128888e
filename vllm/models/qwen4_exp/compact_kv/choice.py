# SPDX-License-Identifier: Apache-2.0
"""Whose kernels write and read which K/V format: the one place that decides.

Upstream has kernels for bf16 and fp8, and its choice of splits follows the number of rows in the batch. Ours take
every format, and a request's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from vllm.platforms import current_platform

#: Key of `--additional-config` that takes other kernels than `DEFAULT` says, to measure or to test them.
KEY = "qsa_kernels"


class Kernels(StrEnum):
    UPSTREAM = "upstream"
    OURS = "ours"
    #: Plain torch, on the CPU.
    REFERENCE = "reference"


#: On a GPU, by the name of the format. bf16 stays upstream's until ours has been measured to be as fast. fp8 is ours
#: because upstream's, below sm_89, gives up its fused cache write and decodes in inline PTX.
DEFAULT = {"bf16": Kernels.UPSTREAM, "fp8": Kernels.OURS, "int8": Kernels.OURS}


class UnknownKernels(ValueError):
    """`qsa_kernels` names kernels that do not exist, or that cannot read the format."""


def chosen(format_name: str, additional_config: Any) -> Kernels:
    """Kernels for a format on this platform.

    Args:
        format_name: a `KVFormat`'s
        additional_config: a VllmConfig's

    Raises:
        UnknownKernels: the key's value is none of those that this platform has for the format.
    """
    on_cpu = current_platform.is_cpu()
    possible = [Kernels.REFERENCE, Kernels.OURS] if on_cpu else [Kernels.OURS, Kernels.UPSTREAM]
    if format_name == "int8" and not on_cpu:
        possible.remove(Kernels.UPSTREAM)
    asked = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if asked is None:
        return Kernels.REFERENCE if on_cpu else DEFAULT[format_name]
    if asked not in possible:
        raise UnknownKernels(
            f"additional_config[{KEY!r}] is {asked!r}, and for {format_name} K/V on this platform there are "
            f"{', '.join(possible)}; leave the key out to take what is best"
        )
    return Kernels(asked)
