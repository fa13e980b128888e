# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the CPU communicator without names that could be left behind."""

from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")


def drop_name(group: str, rank: int) -> None:
    """Remove the name of this rank's segment, once every rank of the group has mapped it.

    The memory stays until the last process that has it mapped ends, however it ends.  A name stays until somebody
    removes it, which upstream leaves to a destructor: workers that were killed never run it.

    Args:
        group: the communicator's group name, which its C++ side completes with `_<rank>`
        rank: within the group
    """
    with suppress(FileNotFoundError):
        (SHM / f"{group}_{rank}").unlink()
