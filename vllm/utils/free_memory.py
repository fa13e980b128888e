# SPDX-License-Identifier: Apache-2.0
"""Host memory that can be had, asked before gigabytes of it are taken.

A container's limit is not in the machine's own figures: whoever exceeds it is killed without a word.
"""

from pathlib import Path

import psutil


def available_bytes() -> int:
    """Memory that can be taken without swapping: the machine's, or the container's where that is less."""
    free = psutil.virtual_memory().available
    for limit, used, cache in _CGROUPS:
        try:
            most = limit.read_text().strip()
            if most == "max":
                continue
            # Page cache of the group is given back under pressure, as the machine's own figure has it.
            stat = dict(line.split() for line in cache.read_text().splitlines() if len(line.split()) == 2)
            free = min(free, int(most) - int(used.read_text()) + int(stat.get("inactive_file", 0)))
        except (OSError, ValueError):
            continue
    return max(0, free)


#: Files of the limit, of what is used, and of what of that is page cache; of cgroups' second and first version.
_CGROUPS = [
    tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current", "memory.stat")),
    tuple(
        Path("/sys/fs/cgroup/memory", name)
        for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    ),
]
