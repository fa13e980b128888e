# SPDX-License-Identifier: Apache-2.0
"""Which of a checkpoint's tensors this process needs, decided by name before a file is opened.

Upstream opens every file on every rank, and takes every tensor out of it to find that a
layer lives on another pipeline stage.  The n-gram table is 102 GB of the published
checkpoint's bytes and lives on one stage, or on none where its rows are read from the
files while serving; nothing of it is opened where it is not needed.
"""

import json
import os
from collections.abc import Callable

import regex as re
from torch import nn

from vllm.ampere.checkpoint.config import ARCHITECTURES
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

logger = init_logger(__name__)

_TABLE = re.compile(r"(?:^|\.)ple\.ple_embedding\.ngram_embedding\.")
_LAYER = re.compile(r"^.*?\blayers\.[0-9]+\b")

OTHER_STAGE = "belongs to another pipeline stage"
DRAFT = "belongs to the draft module, which is loaded for speculative decoding only"
VISION = "belongs to the vision encoder, which this engine does not run"
IN_FILES = "is read from its file while serving (host_file_gather)"


class NeededWeights:
    """The tensors that one model, as it was built on this rank, takes from a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = type(model).__name__ in ARCHITECTURES
        self._own = getattr(model, "is_unused_checkpoint_weight", None)
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        # Most names are experts'; what decides about them is the layer.
        self._by_layer: dict[str, str | None] = {}

    def why_not(self, name: str) -> str | None:
        """Why the tensor ``name`` of the checkpoint is not needed here; ``None`` where it is."""
        if is_ple_table(name) and serves_from_files():
            return IN_FILES
        if self._own is not None and self._own(name):
            return "is not part of this model"
        if not self._known:
            return None
        if name.startswith("mtp.") or ".mtp." in name:
            return DRAFT
        layer = _LAYER.match(name)
        if layer is None:
            return self._resolve(name)
        if layer[0] not in self._by_layer:
            self._by_layer[layer[0]] = self._resolve(f"{layer[0]}.")
        return self._by_layer[layer[0]]

    def unused(self, name: str) -> bool:
        """Whether no module of this rank wants the tensor."""
        return self.why_not(name) is not None

    def _resolve(self, name: str) -> str | None:
        """Follow a name through the modules to the first that was not built."""
        # On use: the loader's utilities import this module.
        from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

        mapped = self._mapper.map_name(name) if self._mapper is not None else name
        if mapped is None:
            return DRAFT
        module: nn.Module | None = self._model
        for part in mapped.rstrip(".").split("."):
            child = module._modules.get(part)
            if isinstance(child, PPMissingLayer):
                return OTHER_STAGE
            if isinstance(child, StageMissingLayer) or (child is None and part == "visual"):
                return VISION
            if child is None:
                # The final mixer is an attribute that is None before the last stage.
                return OTHER_STAGE if part in vars(module) and vars(module)[part] is None else None
            module = child
        return None


def is_ple_table(name: str) -> bool:
    """Whether a checkpoint's tensor is a part of an n-gram table: of its rows or of their scales."""
    return _TABLE.search(name) is not None


def serves_from_files() -> bool:
    """Whether rows of the table are read from the checkpoint's files while serving."""
    # The current config is the worker's; a draft model shares the target's setting.
    config = get_current_vllm_config_or_none()
    engram = config.engram_config if config is not None else None
    return engram is not None and bool(engram.host_file_gather)


def unused_weight_filter(model: nn.Module) -> Callable[[str], bool] | None:
    """Which tensors a model does not load; ``None`` when it loads all."""
    needed = NeededWeights(model)
    if not needed._known and not serves_from_files():
        return needed._own
    return needed.unused


_loading: Callable[[str], bool] | None = None


class skipping:
    """While a model loads, let the iterator pass over what it does not need."""

    def __init__(self, unused: Callable[[str], bool]) -> None:
        self._unused = unused

    def __enter__(self) -> None:
        global _loading
        self._before, _loading = _loading, self._unused

    def __exit__(self, *_: object) -> None:
        global _loading
        _loading = self._before


def skips_weight(name: str) -> bool:
    """Whether the loader shall pass over a tensor before it takes it out of its file."""
    if _loading is not None:
        return _loading(name)
    return is_ple_table(name) and serves_from_files()


def needed_files(files: list[str], folder: str, index_file: str, unused: Callable[[str], bool]) -> list[str]:
    """The files that hold a tensor which is needed.

    Where there is an index it decides, and what it leaves out is never opened; files that
    it does not name have their headers looked at.

    Args:
        files: paths below ``folder``
        index_file: the index's name, whether it exists or not
        unused: whether a tensor, by its name, is not needed

    Returns:
        A part of ``files`` in their order; all of them where none is needed, as upstream does.
    """
    from vllm.model_executor.model_loader.weight_utils import filter_safetensors_files_by_weight_name

    by_file = _names_by_file(os.path.join(folder, index_file))
    unsure = [path for path in files if path not in by_file]
    looked_at = set(filter_safetensors_files_by_weight_name(unsure, unused)) if unsure else set()
    kept = [
        path
        for path in files
        if (not all(unused(name) for name in by_file[path]) if path in by_file else path in looked_at)
    ]
    if len(kept) < len(files):
        logger.info(
            "Files that hold nothing for this process, and stay closed: %d of %d", len(files) - len(kept), len(files)
        )
    return kept or files


def _names_by_file(index: str) -> dict[str, list[str]]:
    """Absolute path -> tensors that the index says are in it; nothing where there is no index."""
    if not os.path.isfile(index):
        return {}
    with open(index, encoding="utf-8") as file:
        weight_map = json.load(file)["weight_map"]
    files: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        files.setdefault(os.path.join(os.path.dirname(index), file_name), []).append(name)
    return files


def prefetch_share(files: list[str], rank: int, world_size: int) -> list[str]:
    """The files that this rank pulls into the page cache.

    Upstream deals them out over all ranks, which supposes that every rank has the same
    list. Stages have different ones; ranks of one stage share one.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    if world_size == 1 or get_pp_group().world_size == 1:
        return files[rank::world_size]
    tp = get_tp_group()
    return files[tp.rank_in_group :: tp.world_size]
