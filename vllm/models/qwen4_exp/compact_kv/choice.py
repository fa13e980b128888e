# SPDX-License-Identifier: Apache-2.0
"""Whose kernels write and read which K/V format: the one place that decides.

Upstream has kernels for bf16 and fp8, and its choice of splits follows the number of rows in the batch. Ours take
every format, and a request's result does not depend on its neighbours.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config.qsa import QSAConfig


class Kernels(StrEnum):
    UPSTREAM = "upstream"
    OURS = "ours"
    #: Plain torch, on the CPU.
    REFERENCE = "reference"


#: On a GPU, by the name of the format. On an H200 with sm_86's tiles ours takes bf16 prompts at 1.01 to 1.02 times the
#: speed of upstream's, one decoding request at 1.00 to 1.04 and eight at 1.75 to 1.79 (docs/ampere-multigpu/kv-cache.md).
#: Upstream's fp8, below sm_89, gives up its fused cache write.
DEFAULT = {"bf16": Kernels.OURS, "fp8": Kernels.OURS, "int8": Kernels.OURS}


class UnknownKernels(ValueError):
    """`--qsa-config kernels` names kernels that this platform does not have for the format."""


def chosen(format_name: str, qsa_config: QSAConfig | None) -> Kernels:
    """Kernels for a format on this platform.

    Args:
        format_name: a `KVFormat`'s
        qsa_config: a VllmConfig's; its `kernels` takes others than `DEFAULT` says, to measure or to test them

    Raises:
        UnknownKernels: it names none of those that this platform has for the format.
    """
    on_cpu = current_platform.is_cpu()
    possible = [Kernels.REFERENCE, Kernels.OURS] if on_cpu else [Kernels.OURS, Kernels.UPSTREAM]
    if format_name == "int8" and not on_cpu:
        possible.remove(Kernels.UPSTREAM)
    asked = qsa_config.kernels if qsa_config is not None else None
    if asked is None:
        return Kernels.REFERENCE if on_cpu else DEFAULT[format_name]
    if asked not in possible:
        raise UnknownKernels(
            f"--qsa-config kernels={asked}: for {format_name} K/V on this platform there are {', '.join(possible)}; leave "
            "it out to take the faster"
        )
    return Kernels(asked)
