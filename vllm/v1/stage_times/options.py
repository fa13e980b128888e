"""The option `stage_times` of `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The key below `--additional-config`.
KEY = "stage_times"


class StageTimesNotBoolean(ValueError):
    """`stage_times` is neither true nor false."""


class StageTimesUnsupported(ValueError):
    """The workers of this executor cannot be reached."""


def wanted(additional_config: Any) -> bool:
    """Whether a VllmConfig's `additional_config` asks for times.

    Raises:
        StageTimesNotBoolean: it says something else.
    """
    value = additional_config.get(KEY, False) if isinstance(additional_config, Mapping) else False
    if not isinstance(value, bool):
        raise StageTimesNotBoolean(f"additional_config[{KEY!r}] is {value!r}, expected true or false")
    return value
