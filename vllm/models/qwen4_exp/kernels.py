# SPDX-License-Identifier: Apache-2.0
"""One place that picks the model's kernels for the platform at hand.

On a GPU they are upstream's Triton launchers, or ours where a line below says why; on
the CPU the plain-torch twins of the same names and signatures under ``cpu``.  ``from ..kernels import hc_silu`` works
like any import; a module is loaded when one of its names is first asked for,
because FlashInfer, for one, is not everywhere.
"""

import importlib
from typing import Any

from vllm.platforms import current_platform

_HYPERCONNECTION = (".cpu.hyperconnection", ".nvidia.ops.hc")
_PLE = (".cpu.ple", ".common.ops.ple")
_QSA = (".cpu.qsa", ".nvidia.ops.qsa")
_QSA_INDEXER = (".cpu.qsa", ".nvidia.ops.qsa_indexer")
# Ours before upstream's: what a store rounds to is ours too.
_QSA_ROWS = (".cpu.qsa", ".qsa.index_keys")
# Ours on both: upstream's top-k operator leaves ties to chance.
_QSA_SELECTION = (".cpu.qsa", ".qsa.select")

# name -> (its module on the CPU, its module elsewhere)
SOURCES = {
    "grouped_gemma_rmsnorm": _HYPERCONNECTION,
    "hc_combine": _HYPERCONNECTION,
    "hc_combine_norm": _HYPERCONNECTION,
    "hc_gate_mix": _HYPERCONNECTION,
    "hc_silu": _HYPERCONNECTION,
    "ple_conv": _PLE,
    "ple_gate": _PLE,
    "gemma_rmsnorm": (".cpu.qsa", "flashinfer.norm"),
    "qsa_compress_groups_with_ratio": _QSA,
    "qsa_store_cache_rows": _QSA_ROWS,
    "expand_qsa_block_indices": _QSA_INDEXER,
    "qsa_select_paged_decode": _QSA_SELECTION,
    "qsa_select_paged_prefill": _QSA_SELECTION,
}


def __getattr__(name: str) -> Any:
    if name not in SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = SOURCES[name][0 if current_platform.is_cpu() else 1]
    return getattr(importlib.import_module(module, __package__), name)


def attention_impl(gpu_impl: type) -> type:
    """The class that writes K/V and attends: a subclass of ``gpu_impl``, or the CPU's own."""
    if current_platform.is_cpu():
        from .cpu.qsa.impl import CpuQSAImpl

        return CpuQSAImpl
    from .compact_kv.impl import own_impl

    return own_impl(gpu_impl)


def rotate(rotary_emb: Any) -> Any:
    """The function that applies ``rotary_emb`` to ``(x, cos, sin)``."""
    op = rotary_emb.apply_rotary_emb
    return op.forward_native if current_platform.is_cpu() else op.forward_cuda
