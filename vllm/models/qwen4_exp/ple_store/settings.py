# SPDX-License-Identifier: Apache-2.0
"""Which store ``--engram-config`` asks for, and what reading rows from files does not go with.

host_file_path     one flat file (``flat/``); turns host_file_gather on
host_file_gather   otherwise the checkpoint's shards
cpu_offload        otherwise upstream's table in pinned memory, else on the device
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.ampere.checkpoint.config import ARCHITECTURES
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.metrics import ngram_table

from .errors import HostFileGatherRefused
from .fits import exceeds_memory

if TYPE_CHECKING:
    from vllm.config import EngramConfig, ModelConfig, VllmConfig

# Those that read the checkpoint's own safetensors files tensor by tensor.  ``dummy``
# reads nothing, and only needs the table's files to exist.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")

#: What host_file_path was called in the fork that had it first.
PATH_VARIABLE = "VLLM_PLE_MMAP_PATH"

_TURN_OFF = (
    "Without pinned memory the other home of the table is ordinary memory, all of it: "
    '--engram-config \'{"host_file_gather": false, "cpu_offload": false}\'.'
)


def resolve_host_file_gather(vllm_config: "VllmConfig", model_config: "ModelConfig") -> None:
    """Decide an unset ``host_file_gather`` and check the result.

    Unset becomes true where the table would be pinned (``cpu_offload``, the default)
    but the platform cannot pin memory, or has less of it than the table takes;
    everywhere else it becomes false, upstream's behaviour.  Calling it again on the
    outcome changes nothing.

    Args:
        vllm_config: its ``engram_config`` is set, and is changed in place
        model_config: the target model's, also where a draft model is being configured

    Raises:
        HostFileGatherRefused: another setting stands in the way
    """
    engram = vllm_config.engram_config
    has_store = _has_store(model_config)
    _resolve_path(engram, has_store)
    cannot_pin = engram.cpu_offload and not is_pin_memory_available()
    if engram.host_file_gather is None:
        engram.host_file_gather = has_store and (
            cannot_pin or engram.cpu_offload and exceeds_memory(vllm_config, model_config)
        )
    if engram.host_file_gather:
        _check_model(model_config)
        _check_engram(engram)
        _check_batches(vllm_config)
        _check_loading(vllm_config)
        # Unset, it would become true for more than one replica; there is no table to
        # share, the page cache does that.
        engram.dp_shared_memory = False
        ngram_table.prepare()
    elif has_store and cannot_pin:
        raise HostFileGatherRefused(
            "host_file_gather",
            False,
            "leaves a pinned table (cpu_offload=True), and this platform has no pinned memory.",
            "Leave host_file_gather out to read rows from the checkpoint's files, or "
            "add cpu_offload=False to hold the table in ordinary memory.",
        )


def flat_file(engram: "EngramConfig") -> Path | None:
    """The flat file that a server with these settings and this environment would read; for whoever only looks at it.

    Raises:
        HostFileGatherRefused: such a server would not start
    """
    _resolve_path(engram, True)
    if engram.host_file_gather:
        _check_engram(engram)
    return Path(engram.host_file_path) if engram.host_file_path else None


def _resolve_path(engram: "EngramConfig", has_store: bool) -> None:
    """Take the flat file's name from the environment if need be; it means that rows are read from files."""
    named = os.environ.get(PATH_VARIABLE) or None
    if named and has_store:
        if engram.host_file_path and engram.host_file_path != named:
            raise HostFileGatherRefused(
                PATH_VARIABLE,
                named,
                f"and host_file_path={engram.host_file_path!r} differ.",
                "Leave one of the two out.",
            )
        engram.host_file_path = named
    if not engram.host_file_path:
        return
    if engram.host_file_gather is False:
        raise HostFileGatherRefused(
            "host_file_path",
            engram.host_file_path,
            "is a file to read rows from, and host_file_gather=False reads none.",
            "Leave one of the two out.",
        )
    path = Path(engram.host_file_path)
    if not path.is_file() and not path.with_name(path.name + ".partial").is_file():
        raise HostFileGatherRefused(
            "host_file_path",
            engram.host_file_path,
            "is no file.",
            f"Write it first: vllm ampere flatten-ple CHECKPOINT {engram.host_file_path}",
        )
    engram.host_file_gather = True


def _has_store(model_config: "ModelConfig") -> bool:
    """Whether this platform's model code reads its rows through ``ple_store``."""
    known = model_config.architecture in ARCHITECTURES
    return known and (current_platform.is_cuda() or current_platform.is_cpu())


def _check_model(model_config: "ModelConfig") -> None:
    if model_config.architecture not in ARCHITECTURES:
        raise HostFileGatherRefused(
            "host_file_gather",
            True,
            f"is for Qwen4Exp models, not for {model_config.architecture}.",
            "Leave it out.",
        )
    if not _has_store(model_config):
        raise HostFileGatherRefused(
            "host_file_gather",
            True,
            f"is for CUDA and the CPU, not for {current_platform.device_name}.",
            "Leave it out: the table is then held in pinned memory.",
        )


def _check_engram(engram: "EngramConfig") -> None:
    """Settings of a table in memory."""
    if not engram.cpu_offload:
        raise HostFileGatherRefused(
            "cpu_offload",
            False,
            "puts the whole table on the device, host_file_gather=True none of it.",
            "Leave one of the two out.",
        )
    for name, why in (
        ("dp_shared_memory", "shares a table in memory, and there is none."),
        ("use_thp", "is about the pages of a table in memory, and there is none."),
        ("embedding_across_dp", "splits the table, but every rank reads all its rows."),
    ):
        if getattr(engram, name):
            raise HostFileGatherRefused(name, True, why, "Leave it out, or set host_file_gather=False.")


def _check_batches(vllm_config: "VllmConfig") -> None:
    """Splits of the batch."""
    if vllm_config.parallel_config.use_ubatching:
        raise HostFileGatherRefused(
            "--enable-dbo / --ubatch-size",
            vllm_config.parallel_config.ubatch_size,
            "runs parts of a batch, but rows are staged for the whole batch.",
            "Turn microbatching off, or set host_file_gather=False.",
        )


def _check_loading(vllm_config: "VllmConfig") -> None:
    """Ways of loading that would read the table on the way, or have no such files."""
    load = vllm_config.load_config
    if load.load_format not in _LOAD_FORMATS:
        raise HostFileGatherRefused(
            "--load-format",
            str(load.load_format),
            "does not read the checkpoint's safetensors files tensor by tensor, so the "
            "n-gram table cannot be left in them.",
            f"Use one of {', '.join(_LOAD_FORMATS)}. {_remedy()}",
        )
    if load.safetensors_load_strategy in ("eager", "torchao"):
        raise HostFileGatherRefused(
            "--safetensors-load-strategy",
            load.safetensors_load_strategy,
            "reads whole files into memory, the n-gram table with them.",
            f"Use lazy or prefetch. {_remedy()}",
        )
    extra = load.model_loader_extra_config
    if isinstance(extra, dict) and extra.get("enable_multithread_load"):
        raise HostFileGatherRefused(
            "enable_multithread_load",
            True,
            "loads whole files, the n-gram table with them.",
            f"Leave it out of --model-loader-extra-config. {_remedy()}",
        )


def _remedy() -> str:
    """How to keep the loader and give up the files."""
    if is_pin_memory_available():
        return "Or set host_file_gather=False to hold the table in pinned memory."
    return _TURN_OFF
