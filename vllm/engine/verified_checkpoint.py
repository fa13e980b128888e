# SPDX-License-Identifier: Apache-2.0
"""Look at the checkpoint's headers before a process starts that would load it.

A missing, cut-off or foreign file otherwise shows minutes into loading, as one traceback
per stage, or not at all: as wrong words.  What can be wrong, and how it is found, is
``vllm.ampere``'s; here stands when a server looks, and what it makes of it.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.ampere.checkpoint import Checkpoint, read
from vllm.ampere.checkpoint.config import ARCHITECTURES
from vllm.ampere.checkpoint.documents import INDEX
from vllm.ampere.finding import REFUSE, Finding
from vllm.ampere.findings import draft, files, findings, refuse
from vllm.ampere.findings.stored_table import TableRefused, stored_tables, without_room_made
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

#: The key below `--additional-config`, and its values: refuse to serve, say what is wrong and serve, do not look.
KEY = "checkpoint_check"
SETTINGS = ("refuse", "warn", "off")

#: warned about in more detail where the server takes its defaults
_SAID_ELSEWHERE = ("SamplingUnsaid", "SharedTargetUnused")


class UnknownCheckpointCheck(ValueError):
    """A value that `checkpoint_check` does not have."""


class Nvfp4NeedsNewerGpu(Finding):
    what = "NVFP4 weights cannot be computed with here"
    remedy = (
        "They run weight-only on NVIDIA GPUs of compute capability 7.5 and later, and dequantized on a CPU. Serve a BF16, "
        "GPTQ or compressed-tensors INT checkpoint here instead; an NVFP4 n-gram table beside such weights is fine."
    )


def setting(additional_config: Any) -> str:
    """The value of `checkpoint_check`.

    Raises:
        UnknownCheckpointCheck: it is none of SETTINGS
    """
    value = additional_config.get(KEY, SETTINGS[0]) if isinstance(additional_config, dict) else SETTINGS[0]
    if value not in SETTINGS:
        raise UnknownCheckpointCheck(f"additional_config[{KEY!r}] is {value!r}, known are {', '.join(SETTINGS)}")
    return value


def verify_checkpoint(vllm_config: "VllmConfig") -> None:
    """Refuse a broken checkpoint, and warn of what it leaves open.

    Called once the configuration is complete and before any process is started.  Only
    directories are looked at: of a hub id the loader may still have files to fetch.
    Where the command line changes the model's config, what the files say against it is a
    warning; what is wrong with a file itself stays a refusal.

    Raises:
        Finding: a subclass for each way to be wrong; further refusals are notes of the first
        UnknownCheckpointCheck: see ``setting``
    """
    model = vllm_config.model_config
    wanted = setting(vllm_config.additional_config)
    if wanted == "off" or getattr(model, "architecture", None) not in ARCHITECTURES:
        return
    # On use, as in `_table`: its package imports torch, which a checkpoint of another model does not need.
    from vllm.models.qwen4_exp.ple_store.source import reads_safetensors

    if not reads_safetensors(vllm_config) or not _has_safetensors(model.model):
        return
    started = time.monotonic()
    overridden = bool(model.hf_overrides) or model.hf_config_path is not None
    try:
        found, checkpoint = _look(model.model, _drafts(vllm_config), _flat_file(vllm_config))
    except Finding as finding:
        found, checkpoint = [finding], None
    for finding in found:
        if finding.severity == REFUSE and (wanted == "warn" or overridden and not _of_a_file(finding)):
            logger.warning(
                "%s (served all the same: %s)", finding, "overridden config" if overridden else f"{KEY}=warn"
            )
        elif finding.severity != REFUSE and finding.name not in _SAID_ELSEWHERE:
            logger.warning("%s", finding)
    refuse(f for f in found if not (wanted == "warn" or overridden and not _of_a_file(f)))
    if checkpoint is not None:
        logger.info(
            "Checkpoint: %d files, %d tensors, looked at by their headers in %.1f s",
            len(checkpoint.shards),
            sum(len(shard.tensors) for shard in checkpoint.shards.values()),
            time.monotonic() - started,
        )


def _has_safetensors(model: str) -> bool:
    """Whether a directory has, or by its index should have, safetensors files; of none at all the loader speaks."""
    folder = Path(model)
    return (folder / INDEX).is_file() or (folder.is_dir() and any(folder.glob("*.safetensors")))


def _drafts(vllm_config: "VllmConfig") -> bool:
    """Whether the checkpoint's own draft module is going to be loaded."""
    config = vllm_config.speculative_config
    if config is None or config.method != "mtp":
        return False
    drafting = getattr(config.draft_model_config, "model", None)
    return drafting in (None, vllm_config.model_config.model)


def _flat_file(vllm_config: "VllmConfig") -> str | None:
    """The file that rows of the n-gram table are read from in place of the checkpoint's, if any."""
    # Stand-ins for a VllmConfig do not have every field.
    return getattr(getattr(vllm_config, "engram_config", None), "host_file_path", None)


def _look(model: str, drafts: bool, flat: str | None) -> tuple[list[Finding], Checkpoint]:
    checkpoint = read(model)
    found = findings(checkpoint)
    if flat:
        found = without_room_made(found)
    if drafts:
        found = [*draft.check(checkpoint), *found]
    if not any(finding.severity == REFUSE for finding in found):
        found = [*_table(checkpoint, flat), *nvfp4(checkpoint), *found]
    return found, checkpoint


def _of_a_file(finding: Finding) -> bool:
    """Whether a finding is about a file by itself, whatever the config says."""
    return type(finding).__module__ in (files.__name__, "vllm.ampere.checkpoint.errors")


def _table(checkpoint: Checkpoint, flat: str | None) -> Iterator[Finding]:
    """What the store that serves the rows would refuse, asked before it is built."""
    for table in stored_tables(checkpoint, Path(flat) if flat else None):
        if isinstance(table, TableRefused):
            yield table
        else:
            logger.info("%s", table)


def nvfp4(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Say how this platform computes with NVFP4 weights, or that it cannot.

    Upstream takes native FP4 from compute capability 10.0 on, and 16-bit activations below;
    on other platforms than these and the CPU the choice stays upstream's.
    """
    names = [
        name
        for name, storage in checkpoint.storages.items()
        if storage.kind == "nvfp4" and checkpoint.modules[name].kind != "ngram_table"
    ]
    if not names:
        return
    if current_platform.is_cpu():
        logger.info(
            "NVFP4 weights of %d modules are dequantized while they load, and take the memory of BF16 ones.", len(names)
        )
    elif current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        if capability is None or capability.to_int() < 75:
            wanted = f"a newer GPU for {len(names)} modules, the first of them {names[0]}"
            yield Nvfp4NeedsNewerGpu("config.json, quantization_config", wanted, f"compute capability {capability}")
        elif capability.to_int() < 100:
            logger.info(
                "NVFP4 weights of %d modules are used weight-only, through %s: compute capability %s has no FP4.",
                len(names),
                "Humming, or Marlin where it is not installed" if capability.to_int() == 90 else "Marlin",
                capability.as_version_str(),
            )
