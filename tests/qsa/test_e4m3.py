"""Every one of the 256 codes, and the edges of rounding and saturation."""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import e4m3, operands
from vllm.triton_utils import tl, triton

ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)
NANS = {0x7F, 0xFF}


@triton.jit
def encode_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, e4m3.encode(tl.load(x + at)))


@triton.jit
def decode_pair_kernel(pairs, out, N: tl.constexpr):
    at = tl.arange(0, N)
    bytes_ = operands.planes(tl.load(pairs + at), "fp8")
    for i in tl.static_range(2):
        tl.store(out + i * N + at, bytes_[i])


def in_byte(place: int, others: int):
    """Codes as one byte of pairs whose other byte is NaN, or zero: neither may come through."""

    def decode(codes):
        bytes_ = torch.full((len(codes), 2), others, dtype=torch.uint8)
        bytes_[:, place] = codes
        out = torch.zeros(2, len(codes), dtype=torch.float16)
        decode_pair_kernel[(1,)](bytes_.view(torch.int16).squeeze(1), out, N=len(codes))
        numbers = out[place].float() / e4m3.SCALE
        return numbers.masked_fill(numbers.isinf(), torch.nan)

    decode.__name__ = f"byte {place} beside {others:#x}"
    return decode


def encoded(x):
    out = torch.zeros(len(x), dtype=torch.uint8)
    encode_kernel[(1,)](x, out, N=len(x))
    return out


def by_definition(code: int) -> float:
    sign, exponent, fraction = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if code in NANS:
        return float("nan")
    return sign * (2.0 ** (exponent - 7) * (1 + fraction / 8) if exponent else 2.0**-6 * fraction / 8)


@pytest.mark.parametrize(
    "decode",
    [e4m3.decode_reference, *(in_byte(place, others) for place in range(2) for others in (0, 0xFF))],
    ids=lambda decode: decode.__name__,
)
def test_every_code_is_its_number(decode):
    want = torch.tensor([by_definition(code) for code in range(256)])
    got = decode(ALL)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), (ALL >= 0x80) & ~got.isnan()), "-0 keeps its sign"


@pytest.mark.parametrize("encode", [encoded, e4m3.encode_reference], ids=["kernel", "reference"])
def test_every_number_is_its_code(encode):
    got = encode(e4m3.decode_reference(ALL))
    numbers = torch.tensor([code not in NANS for code in range(256)])
    assert torch.equal(got[numbers], ALL[numbers])
    assert set((got[~numbers] & 0x7F).tolist()) == {0x7F}


def edges() -> torch.Tensor:
    """All midpoints between neighbours, a hair to either side, and what lies beyond."""
    numbers = torch.tensor([by_definition(code) for code in range(0x7F)])
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middle, torch.tensor(side)) for side in (0.0, 1e9)]
    beyond = torch.tensor([448.5, 464, 480, 1e30, torch.inf, 2.0**-10, 2.0**-11, 1e-40, 0, torch.nan])
    one_side = torch.cat([middle, *beside, beyond])
    both = torch.cat([one_side, -one_side])
    return torch.nn.functional.pad(both, (0, 1024 - len(both)))


def test_edges_round_and_saturate_like_torch():
    x = edges()
    assert torch.equal(encoded(x) & 0x7F, e4m3.encode_reference(x) & 0x7F)
    signs = encoded(x) >= 0x80
    assert torch.equal(signs[~x.isnan()], x.signbit()[~x.isnan()])


def test_beyond_the_largest_is_the_largest():
    x = torch.tensor([449.0, 1e38, torch.inf, -torch.inf])
    assert in_byte(0, 0)(encoded(x)).tolist() == [448.0, 448.0, 448.0, -448.0]
