# SPDX-License-Identifier: Apache-2.0
"""Keep the loader away from an n-gram table that is served from its files.

The table is 102 GB of a checkpoint's bytes.  With ``host_file_gather`` no stage needs
them: tensors of the table are passed over by name, and files that hold nothing else
are left out altogether, so that prefetching does not pull them into the page cache.
"""

from collections.abc import Callable

import regex as re
from torch import nn

from vllm.config import get_current_vllm_config_or_none

_TABLE = re.compile(r"(?:^|\.)ple\.ple_embedding\.ngram_embedding\.")


def is_ple_table(name: str) -> bool:
    """Whether a checkpoint's tensor is a part of an n-gram table: of its rows or of their scales."""
    return _TABLE.search(name) is not None


def skips_ple_table(name: str) -> bool:
    """Whether the loader shall pass over a tensor because its rows stay in the file."""
    return is_ple_table(name) and _serves_from_files()


def unused_weight_filter(model: nn.Module) -> Callable[[str], bool] | None:
    """Which tensors a model does not load; ``None`` when it loads all.

    The model's own filter, where it has one, and the table's tensors where their rows
    stay in the files.
    """
    own = getattr(model, "is_unused_checkpoint_weight", None)
    if not _serves_from_files():
        return own
    if own is None:
        return is_ple_table
    return lambda name: is_ple_table(name) or own(name)


def _serves_from_files() -> bool:
    # The current config is the worker's; a draft model shares the target's setting.
    config = get_current_vllm_config_or_none()
    engram = config.engram_config if config is not None else None
    return engram is not None and bool(engram.host_file_gather)
