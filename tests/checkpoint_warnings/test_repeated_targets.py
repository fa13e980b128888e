"""Groups that claim the same layers, through upstream's own reading of the config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.model_executor.layers.quantization.compressed_tensors import repeated_targets as module
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig


def group(*targets: str, bits: int, **more) -> dict:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    return {"targets": list(targets), "weights": weights, "input_activations": None, "format": "pack-quantized"} | more


@pytest.fixture
def read(monkeypatch):
    """Upstream's scheme of each target, and what was warned of."""
    said: list[str] = []
    logger = SimpleNamespace(warning_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(module, "logger", logger)

    def of(**groups: dict):
        config = {"format": "pack-quantized", "config_groups": groups}
        return CompressedTensorsConfig._quantization_scheme_map_from_config(config), said

    return of


def test_two_schemes_for_all_linear_layers(read):
    schemes, said = read(group_0=group("Linear", bits=4), group_1=group("Linear", bits=8))
    assert schemes["Linear"]["weights"].num_bits == 8
    (warning,) = said
    assert "groups group_0 (4 bits), group_1 (8 bits)" in warning
    assert "'Linear'" in warning and "with that of group_1" in warning


def test_only_the_targets_that_are_shared_are_named(read):
    _, said = read(group_0=group("Linear", "re:.*gate", bits=4), group_1=group("re:.*up", "re:.*gate", bits=8))
    assert len(said) == 1 and "'re:.*gate'" in said[0]


def test_a_difference_outside_the_weights(read):
    eight = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    _, said = read(group_0=group("Linear", bits=8), group_1=group("Linear", bits=8, input_activations=eight))
    assert len(said) == 1


def test_equal_groups_lose_nothing(read):
    _, said = read(group_0=group("Linear", bits=4), group_1=group("Linear", bits=4))
    assert not said


def test_groups_of_their_own_layers(read):
    schemes, said = read(group_0=group("re:.*experts.*", bits=4), group_1=group("Linear", bits=8))
    assert [schemes[name]["weights"].num_bits for name in ("re:.*experts.*", "Linear")] == [4, 8]
    assert not said


def test_no_groups(read):
    assert read() == ({}, [])
