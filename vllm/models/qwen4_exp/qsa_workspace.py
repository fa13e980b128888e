# SPDX-License-Identifier: Apache-2.0
"""The one buffer of GPU memory in which sparse attention scores groups before it selects.

Upstream scores a prompt in a buffer that it allocates for every prompt at its full size, 512 MiB unless
VLLM_SPARSE_INDEXER_MAX_LOGITS_MB says otherwise, and a decode batch in one as large as the batch. Here each worker has
one buffer for all its layers, batches and steps; a batch that needs more is scored in parts. A pass without attention
metadata, such as the memory profile, skips sparse attention, so the buffer is allocated there: it is counted because
it stays. Attention follows selection and takes it as well: for places of a prompt's rows, for states of decode's splits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from transformers import Qwen4ExpTextConfig

logger = init_logger(__name__)

VARIABLE = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
# 170 rows of a context of 262,144 tokens beside a copy of its keys: enough to fill any card, at an eighth of upstream's size.
DEFAULT_MB = 64
_SCORE_BYTES = 4

_buffers: dict[torch.device, torch.Tensor] = {}


def indexer_workspace_bytes(row_bytes: int) -> int:
    """Bytes of the buffer: the configured size, or one row of scores where that is larger."""
    megabytes = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB if envs.is_set(VARIABLE) else DEFAULT_MB
    return max(megabytes << 20, row_bytes)


def indexer_workspace(device: torch.device, row_bytes: int) -> torch.Tensor:
    """The device's buffer, int32, for at least one row of ``row_bytes``; allocated on the first call.

    Its contents are nobody's: every user writes before it reads, and users follow each other on one stream.
    Raises RuntimeError where the buffer exists and is too small, because captured graphs hold its address.
    """
    buffer = _buffers.get(device)
    if buffer is None:
        buffer = torch.empty(indexer_workspace_bytes(row_bytes) // _SCORE_BYTES, dtype=torch.int32, device=device)
        _buffers[device] = buffer
    if buffer.numel() * _SCORE_BYTES < row_bytes:
        raise RuntimeError(
            f"one row of sparse attention takes {row_bytes} bytes, the buffer that was allocated at start has "
            f"{buffer.numel() * _SCORE_BYTES}: set {VARIABLE} to at least {-(-row_bytes >> 20)}"
        )
    return buffer


def take_indexer_workspace(device: torch.device, config: Qwen4ExpTextConfig) -> None:
    """Allocate the buffer on a GPU during a pass that skips sparse attention.

    Nothing happens on a CPU, whose selection has no such buffer, or under graph capture, where the allocation would
    stay in the pool of the graph.
    """
    if device.type != "cuda" or device in _buffers or torch.cuda.is_current_stream_capturing():
        return
    # A score for every group and at most as many tops of runs; columns come in whole tiles.
    groups = -(-config.max_position_embeddings // config.indexer_compress_ratio) + 256
    buffer = indexer_workspace(device, 2 * groups * _SCORE_BYTES)
    logger.info_once(
        "Sparse attention scores groups in %d MiB of GPU memory, which the memory profile counts; a smaller %s leaves "
        "more for the KV cache and scores long prompts in more steps.",
        buffer.numel() * _SCORE_BYTES >> 20,
        VARIABLE,
    )
