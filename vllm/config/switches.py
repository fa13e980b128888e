# SPDX-License-Identifier: Apache-2.0
"""Switches of `--additional-config`: keys of this fork that are true or false."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Key to what it is unless said.
SWITCHES = {
    # Time steps in the engine core and on every stage (vllm/v1/stage_times).
    "stage_times": False,
    # Keep empty steps in the engine core (vllm/v1/engine/quiet_steps.py).
    "quiet_steps": True,
    # Prepare a micro-batch before waiting for its activations (vllm/v1/worker/late_receive.py).
    "late_receive": True,
}


class SwitchNotBoolean(ValueError):
    """A switch is neither true nor false."""


def switch(additional_config: Any, key: str) -> bool:
    """The value of a switch in a VllmConfig's `additional_config`.

    Raises:
        SwitchNotBoolean: it is no boolean.
    """
    default = SWITCHES[key]
    value = additional_config.get(key, default) if isinstance(additional_config, Mapping) else default
    if not isinstance(value, bool):
        raise SwitchNotBoolean(f"additional_config[{key!r}] is {value!r}, expected true or false")
    return value


def check_switches(additional_config: Any) -> None:
    """Refuse a wrong one before the model is loaded, which is when most of them are read. Raises SwitchNotBoolean."""
    for key in SWITCHES:
        switch(additional_config, key)
