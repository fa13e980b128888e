"""What the writer puts on disk, against compressed-tensors' own functions and against what vLLM takes out of it."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from demo.checkpoint.formats import compressed, gptq, modelopt, quantize
from demo.checkpoint.formats.recipes import RECIPES
from demo.checkpoint.formats.rounding import Scheme, round_weight
from demo.checkpoint.geometry import PRESETS
from demo.checkpoint.write import build
from vllm.ampere.checkpoint import read
from vllm.ampere.findings import findings
from vllm.model_executor.layers.quantization.dequantized.reference import dequantize, unpack
from vllm.utils.packed_words import pack_rows

SCHEMES = [Scheme(4, 32), Scheme(4, 128), Scheme(6, 64), Scheme(8, 32), Scheme(8, 128), Scheme(3, 32), Scheme(5, 128)]


def weight(outputs: int = 24, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [256, 250])
def test_packed_as_compressed_tensors_does(bits, columns):
    scheme = Scheme(bits, 1)
    values = torch.randint(-scheme.offset, scheme.offset, (5, columns), dtype=torch.int8)
    assert torch.equal(pack_rows(values.int() + scheme.offset, bits), pack_to_int32(values, bits))


def test_six_bits_lie_across_words():
    packed = pack_rows(torch.tensor([[1, 2, 3, 4, 5, 0b101011]]), 6)
    # Five values are 30 bits; the sixth has its low two there and its high four in the next word.
    first = 1 | 2 << 6 | 3 << 12 | 4 << 18 | 5 << 24 | 0b11 << 30
    assert packed.tolist() == [[first - 2**32, 0b1010]]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [32, 37, 320])
def test_unpack(bits, count):
    values = torch.randint(0, 1 << bits, (3, count))
    assert torch.equal(unpack(pack_rows(values, bits), bits, count).long(), values)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compressed_tensors_weight(scheme):
    rounded = round_weight(weight(), scheme, compressed.SCALE_DTYPE)
    held = compressed.tensors(rounded)
    got = dequantize(held["weight_packed"], held["weight_scale"], scheme.bits, 256, torch.bfloat16)
    assert torch.equal(got, rounded.dequantized())
    assert held["weight_packed"].shape == (24, 256 * scheme.bits // 32)
    assert held["weight_shape"].tolist() == [24, 256]


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 128), Scheme(8, 64)], ids=str)
def test_gptq_weight(scheme):
    rounded = round_weight(weight(), scheme, gptq.SCALE_DTYPE)
    held = gptq.tensors(rounded)
    got = dequantize(held["qweight"].t(), held["scales"].t(), scheme.bits, 256, torch.bfloat16)
    assert torch.equal(got, rounded.dequantized())
    # Version 1 stores zero points less one.
    zeros = unpack(held["qzeros"], scheme.bits, 24) + 1
    assert zeros.unique().tolist() == [scheme.offset]
    assert held["g_idx"].tolist() == [i // scheme.group for i in range(256)]
    assert {name: tensor.dtype for name, tensor in held.items()} == {
        "qweight": torch.int32,
        "qzeros": torch.int32,
        "scales": torch.float16,
        "g_idx": torch.int32,
    }


def test_zero_points():
    values = torch.randint(0, 16, (2, 6, 64))
    zeros, scale = torch.randint(0, 16, (2, 6, 2)), torch.rand(2, 6, 2)
    packed = torch.stack([pack_rows(one, 4) for one in values])
    got = dequantize(packed, scale, 4, 64, torch.float32, zeros)
    spread = [t.repeat_interleave(32, dim=-1) for t in (zeros, scale)]
    assert torch.equal(got, (values - spread[0]) * spread[1])


def test_rounding_error_is_half_a_step():
    rounded = round_weight(weight(), Scheme(6, 64), torch.float32)
    step = rounded.scale.repeat_interleave(64, dim=1)
    assert ((rounded.dequantized(torch.float32) - weight().float()).abs() / step).max() <= 0.5 + 1e-4


def test_group_must_divide():
    with pytest.raises(ValueError, match="320 inputs are not a multiple of the group size 128"):
        round_weight(weight(4, 320), Scheme(8, 128), torch.bfloat16)


def test_gptq_rules_name_what_holds_the_modules():
    made = gptq.config(RECIPES["gptq"])
    assert (made["bits"], made["group_size"]) == (4, 32)
    assert made["dynamic"] == {r"+:.*\.mlp\.experts.*": {"group_size": 128}}


def test_nvfp4_numbers_are_the_nearest_ones_and_unpack_to_what_they_stand_for():
    wanted = weight(32, 128).float()
    over = modelopt.overall([wanted, 2 * wanted])
    tensors, plain = modelopt.packed(wanted, over)
    code = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], -1).view(32, 128).long()
    number = torch.tensor([*modelopt.SIZES, *(-size for size in modelopt.SIZES)])[code]
    scale = (tensors["weight_scale"].float() * tensors["weight_scale_2"]).repeat_interleave(modelopt.GROUP, 1)
    assert torch.equal((number * scale).to(torch.bfloat16), plain)
    choices = torch.tensor([-size for size in modelopt.SIZES[1:]] + [*modelopt.SIZES])
    nearest = (wanted[..., None] / scale[..., None] - choices).abs().min(-1).values
    assert torch.allclose((wanted / scale - number).abs(), nearest, atol=1e-6)
    assert tensors["weight_scale"].shape == (32, 128 // modelopt.GROUP)
    assert tensors["weight_scale"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("recipe", "attention"), [("nvfp4", {"o_proj"}), ("nvfp4-packed", {f"{p}_proj" for p in "qkvo"})]
)
def test_an_nvfp4_checkpoint_is_what_the_check_takes_for_one(recipe, attention, tmp_path):
    build(tmp_path / "source", PRESETS["tiny"])
    pair = quantize(tmp_path / "source", tmp_path / "out", RECIPES[recipe])
    checkpoint = read(pair.quantized)
    # transformers' own generation_config.json, of the source too.
    assert {found.name for found in findings(checkpoint)} == {"SamplingUnsaid"}
    packed = {name for name, storage in checkpoint.storages.items() if storage.kind == "nvfp4"}
    assert {name.rpartition(".")[2] for name in packed} == attention | {
        "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "out_proj",
    }  # fmt: skip
    assert {found.name for found in findings(read(pair.dequantized))} == {"SamplingUnsaid"}


def test_nvfp4_by_the_names_of_compressed_tensors():
    """Its own compressor packs the same codes, and a scale that divides."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    wanted = weight(32, 128).float()
    tensors, _ = modelopt.packed(wanted, modelopt.overall([wanted]))
    named = compressed.nvfp4(tensors)
    _, _, numbers = modelopt.rounded(wanted, tensors["weight_scale_2"])
    scale = tensors["weight_scale"].float().repeat_interleave(modelopt.GROUP, 1) / named["weight_global_scale"]
    assert torch.equal(pack_fp4_to_uint8((numbers / scale).round(decimals=1)), named["weight_packed"])
    assert named["weight_global_scale"].shape == (1,)
