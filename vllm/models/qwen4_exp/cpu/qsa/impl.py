# SPDX-License-Identifier: Apache-2.0
"""What the attention layer calls on the CPU, in place of the FlashAttention impl."""

from ...compact_kv.choice import Kernels
from ...compact_kv.impl import PagedQSA, choose


class CpuQSAImpl(PagedQSA):
    """K/V writes and sparse attention in plain torch, or by the Triton kernels where those are asked for.

    The layer passes FlashAttention's arguments; those that are not named (ALiBi, windows, soft cap) it only ever
    leaves at None.
    """

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: None, sliding_window: None,
        kv_cache_dtype: str, *unused: object
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.kv_cache_dtype = kv_cache_dtype
        self.form, kernels = choose(kv_cache_dtype)
        if kernels is Kernels.REFERENCE:
            from ...qsa.reference import sparse_paged_attention
            from ...qsa.write.reference import write_rows
        else:
            from ...qsa.attention import sparse_paged_attention
            from ...qsa.write import write_rows
        self.write, self.attend = write_rows, sparse_paged_attention
