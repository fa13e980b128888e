# SPDX-License-Identifier: Apache-2.0
"""How much of a row one program takes, by GPU and format."""

from dataclasses import dataclass
from functools import cache

import torch

from vllm.platforms import current_platform

from .formats import BF16, FP8, INT8, KVFormat


@dataclass(frozen=True)
class Tile:
    """Sizes of one launch.

    ``split``, ``block_n`` and ``warps`` decide the order in which a row's numbers are
    added, so decode and prefill share them; stages do not.

    Attributes:
        block_n: columns in one product.
        split: columns between two joins, a power of two; decode gives each split a program.
        warps: warps of a program.
        decode_stages, prefill_stages: steps of the loop's pipeline: 1 is none, 2 copies the
            next tile's rows as this one's are used, 3 to another place meanwhile.
        registers: most of a lane, None if the compiler chooses.

    """

    block_n: int
    split: int
    warps: int
    decode_stages: int
    prefill_stages: int
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.split % self.block_n:
            raise ValueError(f"a split of {self.split} columns is no whole number of tiles of {self.block_n}")
        if self.split & (self.split - 1):
            raise ValueError(f"a split of {self.split} columns is no power of two")


# Chosen from what kernels compile to and what the cards have (docs/ampere-multigpu/roofline.md,
# python -m benchmarks.qsa_kernels.compiled); `python -m benchmarks.qsa_kernels --sweep` times
# candidates on a GPU.
#
#   block_n  Keys and values of a tile lie in shared memory: two programs of one-byte rows at 64
#            columns fit an sm_86 or sm_89, two of bf16 at 32. At 64 each warp has two products
#            to work on at a time, reads the queries half as often as at 32, and issues a fifth
#            fewer instructions a column.
#   split    A request alone should fill the card: 2048 columns in splits of 64 are 66
#            programs, of 128 half of that. But partial states are written and read again:
#            at 64 as many bytes as three quarters of int8 K/V. They stay in the L2 of
#            sm_80, sm_89 and sm_90 (40, 72, 50 MB); sm_86's 6 MB hold eight requests' at 128.
#   warps    Four. Two wait for each other less, and have twice the sums to keep: on an H200
#            prompts take a third longer, in bf16 and in one byte.
#   stages   Rows one tile ahead. A third stage gives rows a second place in shared memory, so
#            that their copies run during all of this tile's products. sm_90 has room for it, and
#            is not faster with it: bf16's prompts take 1,471 instead of 1,099 us.
#   registers  As the compiler likes: limited to 168, int8's prompts take 2,028 instead of 1,552 us.
TILES: dict[tuple[int, KVFormat], Tile] = {
    (80, BF16): Tile(64, 64, 4, 2, 2),
    (80, FP8): Tile(64, 64, 4, 2, 2),
    (80, INT8): Tile(64, 64, 4, 2, 2),
    (86, BF16): Tile(32, 128, 4, 2, 2),
    (86, FP8): Tile(64, 128, 4, 2, 2),
    (86, INT8): Tile(64, 128, 4, 2, 2),
    (89, BF16): Tile(32, 64, 4, 2, 2),
    (89, FP8): Tile(64, 64, 4, 2, 2),
    (89, INT8): Tile(64, 64, 4, 2, 2),
    (90, BF16): Tile(64, 64, 4, 2, 2),
    (90, FP8): Tile(64, 64, 4, 2, 2),
    (90, INT8): Tile(64, 64, 4, 2, 2),
}
_ROW = {80: 80, 86: 86, 87: 86, 89: 89, 90: 90}
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
    return _ROW.get(arch, 89)


@cache
def tile_for(form: KVFormat, device: torch.device) -> Tile:
    """The tile for rows of ``form`` on ``device``."""
    if device.type != "cuda":
        return INTERPRETED
    return TILES[row_of(*capability_of(device)), form]


def capability_of(device: torch.device) -> tuple[int, int]:
    """Of a GPU as vLLM's platform says it, which all other kernels are chosen by and which may stand for another card.

    It does not initialise CUDA in this process.  Torch is asked where vLLM has no platform for the GPU, as in a benchmark
    that runs on the CPU flavour.
    """
    return current_platform.get_device_capability(device.index or 0) or torch.cuda.get_device_capability(device)
