# SPDX-License-Identifier: Apache-2.0
"""Which kernel each function here stands in for, and the registration."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.triton_utils.dispatcher import KernelOverride, register_kernels

from . import block_tables, gumbel, inputs, logits, mamba_align, results

logger = init_logger(__name__)

_GPU = "vllm.v1.worker.gpu"
_MAMBA = "vllm.v1.worker.mamba_utils"

TWINS: dict[str, Callable[..., None]] = {
    f"{_GPU}.block_table._compute_slot_mappings_kernel": block_tables.compute_slot_mappings,
    f"{_GPU}.buffer_utils._apply_write_kernel": block_tables.apply_write,
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": block_tables.zero_kv_blocks,
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": inputs.token_request_mapping,
    f"{_GPU}.input_batch._prepare_pos_seq_lens_kernel": inputs.prepare_pos_seq_lens,
    f"{_GPU}.input_batch._prepare_prefill_inputs_kernel": inputs.prepare_prefill_inputs,
    f"{_GPU}.input_batch._combine_sampled_and_draft_tokens_kernel": inputs.combine_sampled_and_draft_tokens,
    f"{_GPU}.input_batch._get_num_sampled_and_rejected_kernel": results.get_num_sampled_and_rejected,
    f"{_GPU}.input_batch._post_update_kernel": results.post_update,
    f"{_GPU}.input_batch._post_update_num_computed_tokens_kernel": results.post_update_num_computed_tokens,
    f"{_GPU}.model_states.mamba_hybrid._scatter_num_accepted_kernel": results.scatter_num_accepted,
    f"{_GPU}.model_states.mamba_hybrid._fill_num_accepted_kernel": results.fill_num_accepted,
    f"{_MAMBA}.preprocess_mamba_align_fused_kernel": mamba_align.preprocess_mamba_align,
    f"{_MAMBA}.precopy_mamba_align_fused_kernel": mamba_align.precopy_mamba_align,
    f"{_MAMBA}.postprocess_mamba_fused_kernel": mamba_align.postprocess_mamba,
    f"{_GPU}.sample.gumbel._gumbel_sample_kernel": gumbel.gumbel_sample,
    f"{_GPU}.sample.gumbel._temperature_kernel": logits.temperature,
    f"{_GPU}.sample.min_p._min_p_kernel": logits.min_p,
    f"{_GPU}.sample.penalties._penalties_kernel": logits.penalties,
    f"{_GPU}.sample.logprob._topk_log_softmax_kernel": logits.topk_log_softmax,
    f"{_GPU}.sample.logprob._ranks_kernel": logits.ranks,
}

# Functions that launch kernels, replaced as a whole.
LAUNCHERS: dict[str, Callable[..., Any]] = {
    "vllm.v1.sample.ops.topk_topp_triton.apply_top_k_top_p_triton": logits.apply_top_k_top_p,
}

# These get the launch grid as their first argument.
TWINS_WITH_GRID: dict[str, Callable[..., None]] = {
    f"{_GPU}.block_table._gather_block_tables_kernel": block_tables.gather_block_tables,
}


class GridOverride(KernelOverride):
    """An override that learns the launch grid, which vLLM's own leaves out."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._impl, grid)


_registered = False


def replace_interpreted_kernels() -> None:
    """Register every function here, where Triton kernels would be interpreted.

    Does nothing with a Triton that compiles for the CPU, or when called again.
    """
    global _registered
    from triton import knobs

    if _registered or not knobs.runtime.interpret:
        return
    # Must precede the runner's modules: it replaces names that they import.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    for name, twin in (TWINS | LAUNCHERS | TWINS_WITH_GRID).items():
        check_parameters(name, twin)
    register_kernels(TWINS | LAUNCHERS)
    for name, twin in TWINS_WITH_GRID.items():
        module, kernel = _find(name)
        setattr(module, kernel.__name__, GridOverride(kernel, twin))
    _registered = True
    logger.debug("%d interpreted kernels replaced", len(TWINS) + len(TWINS_WITH_GRID))


def check_parameters(name: str, twin: Callable[..., Any]) -> None:
    """Raise TypeError unless ``twin`` takes what the kernel ``name`` takes.

    Constants (``tl.constexpr``) are passed by name, all else by position.
    """
    _, kernel = _find(name)
    function = getattr(kernel, "fn", kernel)
    given = inspect.signature(function).parameters
    constants = [n for n, p in given.items() if "constexpr" in str(p.annotation)]
    positional = [n for n in given if n not in constants]
    if name in TWINS_WITH_GRID:
        positional.insert(0, "grid")
    try:
        inspect.signature(twin).bind(*positional, **dict.fromkeys(constants))
    except TypeError as error:
        raise TypeError(
            f"{twin.__module__}.{twin.__name__} cannot stand in for {name}: {error}; "
            f"the kernel takes {', '.join(given)}. Adapt the function to the kernel"
        ) from error


def _find(name: str) -> tuple[Any, Any]:
    module_name, attribute = name.rsplit(".", 1)
    module = importlib.import_module(module_name)
    return module, getattr(module, attribute)
