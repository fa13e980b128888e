# SPDX-License-Identifier: Apache-2.0
"""Weights of 3, 5, 6 and 7 bits that compressed-tensors up to 0.17 wrote, repacked on their way into the model."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from vllm.ampere.checkpoint import read
from vllm.ampere.checkpoint.config import ARCHITECTURES, present_name
from vllm.ampere.checkpoint.documents import CONFIG, load
from vllm.ampere.checkpoint.names import split
from vllm.ampere.finding import Finding
from vllm.logger import init_logger
from vllm.utils.packed_words import without_gaps

logger = init_logger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]


def repacked(weights: Weights, folder: str) -> Weights:
    """`weights` of the checkpoint in `folder`, those with gaps without them.

    Headers are read again only where the config speaks of such a width, since every rank does it: about 1 s for the
    223,374 tensors of a published mix (formats-check.json).
    """
    widths = gapped(folder)
    if not widths:
        return weights
    logger.info("%d weights are packed with unused bits in every word, and are repacked while they load", len(widths))
    return _repacked(weights, widths)


def _repacked(weights: Weights, widths: dict[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name in widths:
            tensor = without_gaps(tensor, *widths[name])
        yield name, tensor


def gapped(folder: str) -> dict[str, tuple[int, int]]:
    """Tensor name -> (bits, inputs) of every weight with gaps; none for other models, and for what cannot be read."""
    try:
        config = load(Path(folder) / CONFIG) or {}
        if not _may_have_gaps(config):
            return {}
        checkpoint = read(folder)
    except Finding:
        # The check before the start, or the loader behind this, says what is wrong.
        return {}
    storages = checkpoint.storages
    found = {}
    for name, _ in checkpoint.tensors():
        module, suffix = split(name)
        storage = storages[module]
        if suffix == "weight_packed" and storage.repackable:
            found[name] = storage.bits, storage.inputs
    return found


def _may_have_gaps(config: dict) -> bool:
    if not {present_name(name) for name in config.get("architectures") or ()} & set(ARCHITECTURES):
        return False
    details = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    groups = details.get("config_groups") or {}
    widths = [((group or {}).get("weights") or {}).get("num_bits") for group in groups.values()]
    return any(isinstance(bits, int) and 32 % bits for bits in widths if bits)
