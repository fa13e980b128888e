# SPDX-License-Identifier: Apache-2.0
"""Load a model and account for both sides: every parameter was filled, every tensor was taken."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.ampere.checkpoint.config import ARCHITECTURES
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from . import first_start
from .canary import Canaries, Hole
from .needed_weights import NeededWeights, is_ple_table, skipping

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

logger = init_logger(__name__)

_EXTRA = "--model-loader-extra-config '{\"enable_weights_track\": false}'"
#: upstream's class of the checkpoint's own draft module
_DRAFT = "Qwen4ExpMTP"
#: tensors that models drop on purpose, by the end of their names
_DROPPED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "hyper_connection_mixer.block_inject_weight.weight")
_SHOWN = 5


class WeightsNotFilled(ValueError):
    """Parameters of a stage that the checkpoint did not fill, or filled in part."""

    def __init__(self, stage: str, parameters: list[str], total: int) -> None:
        # All arguments go to ``args``, so that the exception survives the pickling between processes.
        super().__init__(stage, parameters, total)
        self.parameters = parameters

    def __str__(self) -> str:
        stage, parameters, total = self.args
        shown = "; ".join(parameters[:_SHOWN]) + ("; …" if len(parameters) > _SHOWN else "")
        return (
            f"{len(parameters)} of {total} parameters of {stage} were not filled from the checkpoint: {shown}. "
            "The checkpoint lacks these weights, or holds them under other names. To serve with zeros in their place "
            f"add {_EXTRA}."
        )


class TakenWeights:
    """The loader's stream of tensors, and which of them ended in a module.

    A loader hands on the name of a parameter for each tensor that it stored, before it asks
    for the next tensor; ``stored`` counts these names.
    """

    stored = 0

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        self.tensors = self.bytes = 0
        self.left: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            before = TakenWeights.stored
            # The consumer may cut the tensor loose; its size is asked for first.
            size, empty = tensor.nbytes, not tensor.numel()
            yield name, tensor
            self.tensors += 1
            self.bytes += size
            # The n-gram layer keeps what it takes; its own loader is strict.
            if TakenWeights.stored == before and not empty and not is_ple_table(name) and ".ple_embedding." not in name:
                self.left.append(name)


def stored_names(names: Iterable[str]) -> set[str]:
    """Collect names of parameters as their tensors are stored."""
    collected = set()
    for name in names:
        TakenWeights.stored += 1
        collected.add(name)
    return collected


def load_accounted(
    loader: "DefaultModelLoader", model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> set[str] | None:
    """``model.load_weights(weights)``, with both sides of the account checked.

    Only for the models of ``ARCHITECTURES`` and their draft module, of which the first side is checked; others load as
    upstream does.

    Args:
        loader: its ``enable_weights_track`` false turns the error into a warning
        weights: of the whole checkpoint, by name

    Returns:
        The names of parameters that were loaded, as the model says.

    Raises:
        WeightsNotFilled: a parameter without a reason (``reason``) was not, or not wholly, written
    """
    kind = type(model).__name__
    if kind not in (*ARCHITECTURES, _DRAFT):
        return model.load_weights(weights)
    canaries = Canaries((name, parameter) for name, parameter in model.named_parameters() if not _is_table(name))
    if kind == _DRAFT:
        # It goes through the whole checkpoint for its own few tensors; what it leaves is the target's.
        what, loaded = "the draft module", model.load_weights(weights)
    else:
        what, loaded = stage_name(model), _load_stage(model, weights)
    parameters = dict(model.named_parameters())  # a loader may have replaced some
    missing = unfilled(model, parameters, canaries, loaded)
    if missing:
        error = WeightsNotFilled(what, missing, len(parameters))
        if loader.enable_weights_track is not False:
            raise error
        logger.warning("%s", error)
    if kind != _DRAFT:
        first_start.announce()
    return loaded


def _load_stage(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
    """The target model's ``load_weights``, which warns of tensors that no stage takes."""
    taken = TakenWeights(weights)
    with skipping(NeededWeights(model).unused):
        loaded = model.load_weights(taken)
    stage = stage_name(model)
    logger.info("Loaded %s: %d tensors, %.3f GiB", stage, taken.tensors, taken.bytes / 2**30)
    divided = _experts_are_divided(model)
    if left := [n for n in taken.left if not n.endswith(_DROPPED) and not (divided and ".experts." in n)]:
        logger.warning(
            "%d tensors of the checkpoint are not used by %s, nor by another: %s%s",
            len(left),
            stage,
            ", ".join(left[:_SHOWN]),
            ", …" if len(left) > _SHOWN else "",
        )
    return loaded


def unfilled(
    model: nn.Module, parameters: dict[str, nn.Parameter], canaries: Canaries, loaded: set[str] | None
) -> list[str]:
    """Parameters that were not filled and have no reason, each with how much of it is missing."""
    holes = canaries.holes(parameters.items())
    missing = []
    for name, parameter in parameters.items():
        hole = holes.get(name)
        if hole is None and name not in canaries.watched and loaded is not None and name not in loaded:
            hole = Hole(parameter.numel(), parameter.numel(), ())
        if hole is None or reason(model, name, parameter, hole) is not None:
            continue
        if hole.missing == hole.total:
            missing.append(name)
        else:
            missing.append(f"{name} ({hole.missing} of {hole.total} values, from {list(hole.first)} on)")
    return missing


def reason(model: nn.Module, name: str, parameter: nn.Parameter, hole: Hole) -> str | None:
    """Why a parameter need not be filled by the checkpoint, or not wholly; ``None`` if it must be."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    method = getattr(module, "quant_method", None)
    if not parameter.numel():
        return "it is empty"
    if getattr(method, "uses_meta_device", False):
        return "online quantization makes it from the weight while loading"
    if isinstance(method, BaseKVCacheMethod) or leaf in ("k_scale", "v_scale", "q_scale", "prob_scale"):
        return "a scale of K/V is 1 where the checkpoint has none"
    if leaf == "input_scale_ub":
        return "it is made from the quantization config"
    if leaf.endswith(("input_scale", "input_global_scale")) and _is_weight_only(method):
        return "activations stay in 16 bits, and have no scale"
    parent = model.get_submodule(path.rpartition(".")[0])
    padding = getattr(parent, "pad_size", 0)
    if padding and leaf == "weight" and hole.missing <= padding * parameter.shape[-1]:
        return "the hyper-connection's projection is padded to 16 rows, and their outputs are dropped"
    moe = getattr(module, "moe_config", None)
    if leaf in ("w13_bias", "w2_bias") and moe is not None and not moe.has_bias:
        return "the GPTQ layout has room for experts' biases, and zeros stand for none"
    if moe is not None and (
        moe.hidden_dim != moe.hidden_dim_unpadded
        or moe.intermediate_size_per_partition != moe.intermediate_size_per_partition_unpadded
    ):
        return "experts are padded to what their kernel takes"
    return None


def _is_weight_only(method: object) -> bool:
    """Whether an NVFP4 method, of linear layers or of experts, was told so by the checkpoint's config."""
    spec = getattr(method, "spec", None)
    return bool(getattr(method, "use_a16", False)) or (spec is not None and spec.activation is None)


def stage_name(model: nn.Module) -> str:
    """``pipeline stage 1 (layers 4 to 7)``, counted from zero, or ``the model`` where there is one stage."""
    group = get_pp_group()
    if group.world_size == 1:
        return "the model"
    inner = next((m for m in model.modules() if hasattr(m, "start_layer") and hasattr(m, "end_layer")), None)
    layers = f" (layers {inner.start_layer} to {inner.end_layer - 1})" if inner is not None else ""
    return f"pipeline stage {group.rank_in_group}{layers}"


def _experts_are_divided(model: nn.Module) -> bool:
    """Whether ranks of this stage hold different experts, so that one of them passes over another's."""
    configs = (getattr(module, "moe_config", None) for module in model.modules())
    return any(getattr(config, "ep_size", 1) > 1 for config in configs if config is not None)


def _is_table(name: str) -> bool:
    """The table in memory: 102 GB that need no second look, every shard's shape was checked by its header."""
    return is_ple_table(name) and name.endswith((".weight", ".weight_scale"))
