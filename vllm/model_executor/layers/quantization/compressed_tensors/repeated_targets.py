# SPDX-License-Identifier: Apache-2.0
"""A warning where groups of a compressed-tensors config claim the same layers with different schemes.

Some exporters of mixed precision wrote every group with the target "Linear". Upstream keeps the last scheme of a
target, so that all layers are read as those of the last group: a shape error far from its cause, or wrong weights.
Which layer belongs to which group stands nowhere else in the config, so the mapping cannot be repaired here.
"""

from __future__ import annotations

from typing import Any

from vllm.ampere.repeated_targets import repeated_targets
from vllm.logger import init_logger

logger = init_logger(__name__)


def warn_of_repeated_targets(config_groups: dict[str, dict[str, Any]]) -> None:
    """Name every target of several schemes, its groups, and the one that counts."""
    for target, names in repeated_targets(config_groups).items():
        logger.warning_once(
            "quantization_config: groups %s have different schemes for the same target %r, and all its layers are read "
            "with that of %s. Export the checkpoint with the layer names of each group as its targets.",
            ", ".join(f"{name} ({bits(config_groups[name])})" for name in names),
            target,
            names[-1],
        )


def bits(group: dict[str, Any]) -> str:
    """'4 bits', as far as the group says."""
    return f"{(group.get('weights') or {}).get('num_bits', '?')} bits"
