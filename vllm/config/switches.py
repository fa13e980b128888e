# SPDX-License-Identifier: Apache-2.0
"""Switches of `--additional-config`: keys of this fork that are true or false.

The option takes an object of any keys, which platforms and backends read; nobody says of a key that nobody reads. So
those that look like one of ours are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
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


#: Keys that others of our modules read, each with a check of its own (pipeline_options.py, verified_checkpoint.py).
ELSEWHERE = ("pipeline_scheduler", "checkpoint_check")
# Ratcliff and Obershelp's ratio: a letter more, less or swapped, a hyphen; "gdn_prefill_backend", upstream's, is far off.
_ALIKE = 0.8


class SwitchNotBoolean(ValueError):
    """A switch is neither true nor false."""


class UnknownSwitch(ValueError):
    """A key that nobody reads, and that looks like one of this fork's."""


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
    """Refuse a wrong one before the model is loaded, which is when most of them are read.

    Raises:
        UnknownSwitch: a key is misspelt.
        SwitchNotBoolean: a value is no boolean.
    """
    known = (*SWITCHES, *ELSEWHERE)
    for key in additional_config if isinstance(additional_config, Mapping) else ():
        if key not in known and (meant := get_close_matches(str(key), known, 1, _ALIKE)):
            raise UnknownSwitch(
                f"additional_config has {key!r}, which nothing reads; write {meant[0]!r}, or leave it out"
            )
    for key in SWITCHES:
        switch(additional_config, key)
