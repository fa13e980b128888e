# SPDX-License-Identifier: Apache-2.0
"""How long the contexts of a step's prompts are, from what the host knows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.models.qwen4_exp.common.qsa_cache import QSAForwardMetadata
    from vllm.v1.attention.backend import CommonAttentionMetadata


def with_contexts(metadata: "QSAForwardMetadata", common: "CommonAttentionMetadata") -> "QSAForwardMetadata":
    """``metadata`` of a step with ``prompt_contexts``: tokens in the contexts of its prompts, together, at most.

    Those that are left out bring one token each; the runner puts them in front. With the longest context of a step for
    every request of it, an H200's host queued 19 ms of empty sections with each chunk of a prompt beside three users who
    decoded at 250,000 tokens, four sparse layers.
    """
    first, count, known = metadata.num_decodes, metadata.num_prefills, common.seq_lens_cpu_upper_bound
    if known is None or not count:
        # Most steps only decode, and pay for no sum.
        metadata.prompt_contexts = count * metadata.max_seq_len
    else:
        metadata.prompt_contexts = int(known[first : first + count].sum())
    return metadata
