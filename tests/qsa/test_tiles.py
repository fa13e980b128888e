"""Every card has its row; cards that cannot run the kernels are told so."""

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp.qsa import tiles
from vllm.models.qwen4_exp.qsa.formats import BF16, INT8
from vllm.models.qwen4_exp.qsa.tiles import INTERPRETED, TILES, NoTiles, Tile, row_of, tile_for
from vllm.platforms.interface import DeviceCapability


@pytest.fixture
def platform(monkeypatch):
    """``platform(capability, torch_says=…)``: what is said of every card; gives the numbers of those asked for."""
    asked = []

    def configure(capability, torch_says):
        def of_platform(index):
            asked.append(index)
            return capability and DeviceCapability(*capability)

        def of_torch(device):
            assert torch_says is not None, "torch was asked"
            return torch_says

        monkeypatch.setattr(tiles, "current_platform", SimpleNamespace(get_device_capability=of_platform))
        monkeypatch.setattr(torch.cuda, "get_device_capability", of_torch)
        tile_for.cache_clear()
        return asked

    yield configure
    tile_for.cache_clear()


@pytest.mark.parametrize(
    "capability, row",
    [((8, 0), 80), ((8, 6), 86), ((8, 7), 86), ((8, 9), 89), ((9, 0), 90), ((10, 0), 89), ((12, 0), 89)],
)
def test_row_of_a_card(capability, row, platform):
    assert row_of(*capability) == row
    platform(capability, torch_says=(9, 0))
    assert tile_for(INT8, torch.device("cuda:0")) is TILES[row, INT8]


def test_the_platform_is_asked_for_the_card_at_hand_and_once(platform):
    """Torch, which would initialise CUDA, is not asked: it may be another card that the platform stands for."""
    asked = platform((8, 6), torch_says=None)
    for _ in range(2):
        assert tile_for(INT8, torch.device("cuda:1")) is TILES[86, INT8]
        assert tile_for(INT8, torch.device("cuda")) is TILES[86, INT8]
    assert asked == [1, 0]


def test_torch_is_asked_where_there_is_no_platform_for_the_card(platform):
    platform(None, torch_says=(8, 0))
    assert tile_for(INT8, torch.device("cuda:0")) is TILES[80, INT8]


def test_too_old_a_card_is_refused():
    with pytest.raises(NoTiles, match="sm_80 or later, this GPU is sm_75"):
        row_of(7, 5)


def test_without_a_gpu_kernels_are_interpreted():
    assert tile_for(BF16, torch.device("cpu")) is INTERPRETED


def test_a_split_is_whole_tiles():
    with pytest.raises(ValueError, match="96 columns is no whole number of tiles of 64"):
        Tile(64, 96, 4, 2, 2)


def test_a_split_is_looked_up_at_once():
    with pytest.raises(ValueError, match="96 columns is no power of two"):
        Tile(32, 96, 4, 2, 2)
