# SPDX-License-Identifier: Apache-2.0
"""Who can share memory: processes that see the same /dev/shm."""

import hashlib
import os
from functools import cache
from pathlib import Path

from vllm.ray.lazy_utils import is_in_ray_actor

SHM = "/dev/shm"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def place() -> str:
    """Eight characters that are equal for two processes if they may share memory.

    That is one boot of one machine and one file system behind /dev/shm, since containers of one machine have their own.
    Under Ray also one Ray node: several on one machine are there to stand for machines.
    """
    facts = [BOOT_ID.read_text() if BOOT_ID.exists() else os.uname().nodename]
    facts.append(str(os.stat(SHM).st_dev) if os.path.isdir(SHM) else "none")
    if is_in_ray_actor():
        import ray

        facts.append(ray.get_runtime_context().get_node_id())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
