# SPDX-License-Identifier: Apache-2.0
"""How much of a row one program takes, by GPU and format."""

from dataclasses import dataclass
from functools import cache

import torch

from .formats import BF16, FP8, INT8, KVFormat


@dataclass(frozen=True)
class Tile:
    """Sizes of one launch.

    ``split``, ``block_n`` and ``warps`` decide the order in which a row's numbers are
    added, so decode and prefill share them; stages do not.

    Attributes:
        block_n: columns in one product.
        split: columns between two joins; decode gives each split a program.
        warps: warps of a program.
        decode_stages, prefill_stages: tiles in shared memory at a time, counting the
            one in use.

    """

    block_n: int
    split: int
    warps: int
    decode_stages: int
    prefill_stages: int

    def __post_init__(self) -> None:
        if self.split % self.block_n:
            raise ValueError(f"a split of {self.split} columns is no whole number of tiles of {self.block_n}")


_FLOOR = {80: 80, 86: 86, 87: 86, 89: 89, 90: 90}

TILES: dict[tuple[int, KVFormat], Tile] = {
    (arch, form): Tile(64, 128, 4, 2, 2) for arch in (80, 86, 89, 90) for form in (BF16, FP8, INT8)
}
# Triton's interpreter: products of the smallest size, two of them a split.
INTERPRETED = Tile(16, 32, 1, 1, 1)


class NoTiles(ValueError):
    """A GPU that these kernels do not support."""


def row_of(major: int, minor: int) -> int:
    """The row of the table for a compute capability.

    Raises NoTiles below sm_80, which has no bf16 products.
    """
    arch = 10 * major + minor
    if arch < 80:
        raise NoTiles(f"sparse attention needs sm_80 or later, this GPU is sm_{arch}")
    # sm_120 has as little shared memory as sm_86; sm_100 has more, and takes what fits.
    return _FLOOR.get(arch, 89)


@cache
def tile_for(form: KVFormat, device: torch.device) -> Tile:
    """The tile for rows of ``form`` on ``device``."""
    if device.type != "cuda":
        return INTERPRETED
    return TILES[row_of(*torch.cuda.get_device_capability(device)), form]
