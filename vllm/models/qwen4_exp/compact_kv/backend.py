# SPDX-License-Identifier: Apache-2.0
"""The attention backend of the sparse layers' main K/V, with every format that is served."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

from ..qsa.formats import CACHE_DTYPES
from .pages import CompactPages

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl


@cache
def compact_backend(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """`base`, upstream's backend of these layers, with our pages and formats.

    A function, because the module of `base` imports this one. One class for each base: layers are grouped by backend.
    """
    from ..kernels import attention_impl

    class CompactQSABackend(CompactPages, base):
        supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

        @staticmethod
        def get_impl_cls() -> type[AttentionImpl]:
            return attention_impl(base.get_impl_cls())

    return CompactQSABackend
