# SPDX-License-Identifier: Apache-2.0
"""Sparse attention's q, k and v, which upstream builds in 16 bits under one of the methods."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.scheme import QKV
from vllm.ampere.finding import Finding


class Nvfp4Attention(Finding):
    what = "q, k or v of sparse attention are packed as NVFP4"
    remedy = (
        "Upstream builds these three with 16-bit weights under ModelOpt's NVFP4, whatever the checkpoint says, and would "
        "stop while loading. Quantize again with self_attn.q_proj, k_proj and v_proj in exclude_modules."
    )


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    if not checkpoint.declared.plain_attention:
        return
    packed = [
        name
        for name, storage in checkpoint.storages.items()
        # Of one that the config excludes it is said that this contradicts the tensors.
        if storage.kind == "nvfp4" and QKV.search(name) and checkpoint.schemes[name] is not None
    ]
    if packed:
        more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
        yield Nvfp4Attention(packed[0] + more, "BF16", str(checkpoint.storages[packed[0]]))
