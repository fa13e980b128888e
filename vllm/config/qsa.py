# SPDX-License-Identifier: Apache-2.0
"""`--qsa-config`: where the K/V of sparse attention (QSA) lives, and whose kernels read it."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from vllm.config.utils import config, get_hash_factors, hash_factors

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

#: Environment variables of an earlier patch set, read as the fields that they stand for.
ALIASES = {
    "VLLM_QSA_KV_OFFLOAD": "kv_offload",
    "VLLM_QSA_KV_OFFLOAD_MAX_GIB": "kv_offload_max_gib",
    "VLLM_QSA_KVO_ARENA": "arena_bytes",
}

DEFAULT_ARENA_BYTES = 96 << 20
# Two halves of a section each, and a section of fewer than some hundred rows would be all overhead.
SMALLEST_ARENA_BYTES = 1 << 10

_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


class QSAConfigRefused(ValueError):
    """A value of `--qsa-config`, or of one of its environment variables, that cannot be used."""


@config
class QSAConfig:
    """Configuration of sparse attention (QSA) in Qwen4Exp models."""

    kv_offload: bool | None = None
    """Keep the K/V rows of the sparse-attention layers in host memory. A step
    reads at most the indexer's budget of them for each token, so they may lie
    beyond PCIe; the GPU keeps pooled keys of 64 bytes a token and layer (32 with
    --attention-config.indexer_kv_dtype fp8) instead of K/V of 2048. Each pipeline
    stage and tensor-parallel rank pins its own rows at start, in exactly the size
    that its blocks need. Off unless set."""

    kv_offload_max_gib: float | None = None
    """Most host memory, in GiB, that K/V of all stages and ranks on one machine
    may take. Fewer KV cache blocks are made where they would need more. Unset,
    the size follows from the KV cache on the GPUs, and start-up refuses what the
    machine does not have. Only with kv_offload."""

    arena_bytes: int | None = None
    """GPU memory, in bytes and on each rank, through which a prompt reads K/V
    from host memory: one half holds the section that attention is at while the
    next one is copied to the other. Its size does not depend on the context.
    96 MiB unless set. Only with kv_offload."""

    kernels: Literal["ours", "upstream"] | None = None
    """Kernels that write and read K/V. `ours` read every format, and what a
    request gets does not depend on its neighbours in the batch; on a machine
    without a GPU they are interpreted, which is for tests. `upstream` read
    bfloat16 and fp8, on GPUs. Unset, ours on a GPU, for every format, and plain
    torch without one."""

    def compute_hash(self) -> str:
        """Hash of settings that may change compiled code."""
        return hash_factors(get_hash_factors(self, {"kv_offload_max_gib"}))


def resolve_qsa_config(vllm_config: "VllmConfig", environ: Mapping[str, str] = os.environ) -> None:
    """Fill fields left unset from the environment, then with defaults, and check the result.

    `vllm_config.qsa_config` stays None where neither names a field, which is upstream's behaviour. A second call
    changes nothing. What a model or another setting cannot be combined with is checked where the model is known
    (`models/qwen4_exp/qsa/host_kv/settings.py`).

    Raises:
        QSAConfigRefused: a value is out of range, belongs to kv_offload, which is off, or to another model.
    """
    named = {field: _read(variable, environ[variable]) for variable, field in ALIASES.items() if environ.get(variable)}
    if vllm_config.qsa_config is None:
        if not named:
            return
        vllm_config.qsa_config = QSAConfig()
    settings = vllm_config.qsa_config
    for field, value in named.items():
        if getattr(settings, field) is None:
            setattr(settings, field, value)
    _check(settings)
    if settings.kv_offload:
        _check_model(vllm_config)


def offloads_kv(vllm_config: "VllmConfig") -> bool:
    """Whether sparse layers keep their K/V in host memory.

    Stand-ins for a VllmConfig do not have every field, hence the default.
    """
    qsa_config = getattr(vllm_config, "qsa_config", None)
    return qsa_config is not None and bool(qsa_config.kv_offload)


def _read(variable: str, text: str) -> bool | float | int:
    field = ALIASES[variable]
    if field == "kv_offload":
        if text.lower() not in _SWITCH:
            raise QSAConfigRefused(f"{variable}={text!r}, expected 1 or 0 (it stands for --qsa-config {field})")
        return _SWITCH[text.lower()]
    try:
        return float(text) if field == "kv_offload_max_gib" else int(text)
    except ValueError:
        raise QSAConfigRefused(f"{variable}={text!r}, expected a number (it stands for --qsa-config {field})") from None


def _check(settings: QSAConfig) -> None:
    settings.kv_offload = bool(settings.kv_offload)
    if not settings.kv_offload:
        for field in ("kv_offload_max_gib", "arena_bytes"):
            if getattr(settings, field) is not None:
                raise QSAConfigRefused(
                    f"--qsa-config {field}={getattr(settings, field)} has no effect without kv_offload=true; "
                    "add that, or leave it out"
                )
        return
    if settings.kv_offload_max_gib is not None and not settings.kv_offload_max_gib > 0:
        raise QSAConfigRefused(
            f"--qsa-config kv_offload_max_gib={settings.kv_offload_max_gib}, expected more than 0 GiB; "
            "leave it out to take what the KV cache on the GPUs needs"
        )
    if settings.arena_bytes is None:
        settings.arena_bytes = DEFAULT_ARENA_BYTES
    if settings.arena_bytes < SMALLEST_ARENA_BYTES:
        raise QSAConfigRefused(
            f"--qsa-config arena_bytes={settings.arena_bytes}, expected at least {SMALLEST_ARENA_BYTES}; "
            f"leave it out for {DEFAULT_ARENA_BYTES}"
        )


def _check_model(vllm_config: "VllmConfig") -> None:
    from vllm.ampere.checkpoint.config import ARCHITECTURES

    model = vllm_config.model_config
    if model is None or model.architecture not in ARCHITECTURES:
        name = "no model" if model is None else model.architecture
        raise QSAConfigRefused(
            f"--qsa-config kv_offload=true is for {', '.join(sorted(ARCHITECTURES))}, not for {name}; leave it out"
        )
