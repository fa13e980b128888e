# SPDX-License-Identifier: Apache-2.0
"""A word before the long silence of a first start.

Upstream's Triton kernels are compiled and tuned when they first run, in the memory profile, one after the other.  On the
host of an H200 the first layer's took 90 to 115 s, with nothing in the log; the next start found them and took 1 s.
"""

from pathlib import Path

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

#: Compiled kernels from which on a cache is not a new one: one start leaves several hundred.
_KNOWN = 100


def announce() -> None:
    """Say that compiling takes a while, if the cache of compiled kernels is (nearly) empty. Nothing without CUDA."""
    if not current_platform.is_cuda():
        return
    from vllm.triton_utils import triton

    folder = Path(triton.knobs.cache.dir)
    if compiled(folder) < _KNOWN:
        logger.info_once(
            "First start with these kernels: compiling and tuning takes a minute or two in silence (90 to 115 s on an "
            "H200's host). Later starts find them in %s; keep it, in a container on a volume.",
            folder,
        )


def compiled(folder: Path) -> int:
    """Entries of a Triton cache; 0 where there is none."""
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0
