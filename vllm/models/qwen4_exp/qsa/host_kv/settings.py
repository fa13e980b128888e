# SPDX-License-Identifier: Apache-2.0
"""What K/V in host memory does not go with."""

from typing import TYPE_CHECKING

from vllm.config.qsa import offloads_kv
from vllm.platforms import current_platform

from .errors import KVOffloadRefused

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_settings(vllm_config: "VllmConfig") -> None:
    """Refuse settings that K/V in host memory cannot be combined with, before anything is loaded.

    Raises:
        KVOffloadRefused: names the setting, why, and what to do.
    """
    if not offloads_kv(vllm_config):
        return
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise KVOffloadRefused(
            "the platform", current_platform.device_name, "has no such rows; CUDA and the CPU have.", "Leave it out."
        )
    if vllm_config.speculative_config is not None:
        raise KVOffloadRefused(
            "--speculative-config",
            vllm_config.speculative_config.method,
            "adds a sparse layer that is not placed, and rows that a rejected draft leaves behind were not tried.",
            "Leave one of the two out.",
        )
    if vllm_config.kv_transfer_config is not None:
        raise KVOffloadRefused(
            "--kv-transfer-config / --kv-offloading-size",
            vllm_config.kv_transfer_config.kv_connector,
            "moves what the GPU's KV cache holds, which would be half of a block.",
            "Leave one of the two out.",
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise KVOffloadRefused(
            "--enable-sleep-mode", True, "frees the KV cache on the GPU and not its rows here.", "Leave one out."
        )
    # Each replica plans alone: every one would take the whole limit, and all that is free before the others have taken.
    if (replicas := vllm_config.parallel_config.data_parallel_size) > 1:
        raise KVOffloadRefused(
            "--data-parallel-size",
            replicas,
            "plans host memory in every replica as if there were no other.",
            "Run a server for each replica, with a kv_offload_max_gib of its own.",
        )
