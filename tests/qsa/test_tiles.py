"""Every card has its row; cards that cannot run the kernels are told so."""

import pytest
import torch

from vllm.models.qwen4_exp.qsa.formats import BF16, INT8
from vllm.models.qwen4_exp.qsa.tiles import INTERPRETED, TILES, NoTiles, Tile, row_of, tile_for


@pytest.mark.parametrize(
    "capability, row",
    [((8, 0), 80), ((8, 6), 86), ((8, 7), 86), ((8, 9), 89), ((9, 0), 90), ((10, 0), 89), ((12, 0), 89)],
)
def test_row_of_a_card(capability, row, monkeypatch):
    assert row_of(*capability) == row
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tile_for.cache_clear()
    assert tile_for(INT8, torch.device("cuda:0")) is TILES[row, INT8]
    tile_for.cache_clear()


def test_too_old_a_card_is_refused():
    with pytest.raises(NoTiles, match="sm_80 or later, this GPU is sm_75"):
        row_of(7, 5)


def test_without_a_gpu_kernels_are_interpreted():
    assert tile_for(BF16, torch.device("cpu")) is INTERPRETED


def test_a_split_is_whole_tiles():
    with pytest.raises(ValueError, match="96 columns is no whole number of tiles of 64"):
        Tile(64, 96, 4, 2, 2)
