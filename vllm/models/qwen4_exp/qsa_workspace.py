"""Memory that a prompt needs for the indexer's scores, taken during the profiling pass so that it is counted.

Upstream scores a prompt in chunks, in a buffer that it allocates for every prompt at its full size:
VLLM_SPARSE_INDEXER_MAX_LOGITS_MB (512 unless set), or one row of scores where that is larger. A pass without
attention metadata skips sparse attention and with it this buffer, which is the largest that it uses: the top-k
workspace is 1 MiB, and split partial results exist only for batches of at most 256 tokens.
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
_SCORE_BYTES = 4


def indexer_workspace_bytes(max_position: int, compress_ratio: int) -> int:
    """Bytes of scores that a prompt takes: the configured size, or one row of a context of `max_position` tokens."""
    row = -(-max_position // compress_ratio) * _SCORE_BYTES
    return max(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20, row)


def take_indexer_workspace(device: torch.device, config: Qwen4ExpTextConfig) -> None:
    """Allocate the workspace on a GPU and give it back, so that it stands in the peak of the pass that runs.

    Nothing happens on a CPU, whose indexer has no such buffer, or under graph capture, where the allocation would
    stay in the pool of the graph.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    size = indexer_workspace_bytes(config.max_position_embeddings, config.indexer_compress_ratio)
    torch.empty(size, dtype=torch.uint8, device=device)
    logger.info_once(
        "Sparse attention scores prompts in %d MiB of GPU memory, which the memory profile counts; a smaller %s leaves "
        "more for the KV cache and scores long prompts in more steps.",
        size >> 20,
        VARIABLE,
    )
