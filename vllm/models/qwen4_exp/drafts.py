# SPDX-License-Identifier: Apache-2.0
"""How many tokens may be drafted, decided from the configuration alone.

A sparse layer keeps the raw index keys of each request's open group in a ring, and beside them those of a step's
drafts, which may be rejected. The ring's length must divide the cache's block size. Upstream asserts that when it
plans the cache: in a worker, after the weights were loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "--speculative-config"

#: Every block size of every backend is a multiple of it. The size itself is computed later, in the workers: 1568 for
#: the published model, which a ring of 12 does not divide.
BLOCK_MULTIPLE = 16


class DraftCountNotServed(ValueError):
    """`num_speculative_tokens` asks for rings that fit no cache block."""


def check_drafts(vllm_config: VllmConfig) -> None:
    """Refuse a number of drafts that the workers would refuse; of any method.

    Called while the configuration is built, in every process.

    Raises:
        DraftCountNotServed: names the setting, its value, and the values that are served.
    """
    config = vllm_config.speculative_config
    ratio = getattr(vllm_config.model_config.hf_text_config, "indexer_compress_ratio", None)
    if config is None or not ratio:
        return
    drafts = config.num_speculative_tokens or 0
    ring = ring_length(ratio, drafts)
    if drafts and BLOCK_MULTIPLE % ring:
        raise DraftCountNotServed(
            f"num_speculative_tokens={drafts} in {OPTION} is not served: the sparse layers would keep {ring} raw keys of "
            f"each request, a length that must divide the cache's blocks, which are multiples of {BLOCK_MULTIPLE}; use "
            f"{served(ratio)}"
        )


def ring_length(ratio: int, drafts: int) -> int:
    """Raw keys that a sparse layer keeps of each request: those of a group and of the drafts, in whole groups."""
    return -(-(ratio + drafts) // ratio) * ratio


def served(ratio: int) -> str:
    """The numbers of drafts that are served, e.g. "1 to 4 or 9 to 12"."""
    rings = [ring for ring in range(2 * ratio, BLOCK_MULTIPLE + 1, ratio) if BLOCK_MULTIPLE % ring == 0]
    return " or ".join(f"{ring - 2 * ratio + 1} to {ring - ratio}" for ring in rings) or "none"
