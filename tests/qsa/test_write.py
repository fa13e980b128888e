"""The writers against torch: bit for bit in the interpreter, and nothing outside the slots.

Projections are small whole numbers where bits are compared: their squares add up alike in any order. On a GPU a sum
may end one fp32 place away, and then one number in about 30,000 is rounded to the next bf16.
"""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import write
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, views
from vllm.models.qwen4_exp.qsa.write import reference

D, Q_HEADS, KV_HEADS, PAGE = 32, 6, 2, 4
FORMS = pytest.mark.parametrize("form", [BF16, FP8, INT8], ids=lambda form: form.name)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cache(form, head_dim=D, pages=5) -> torch.Tensor:
    """An allocation that nothing has written to: bytes that are NaN as bf16, e4m3 and fp32."""
    content = form.content(head_dim)
    # Heads lie together in a token, as vLLM binds one of its layouts.
    raw = torch.full((pages, PAGE, KV_HEADS, content), -1, dtype=torch.int8)
    raw = raw.repeat_interleave(form.dtype.itemsize, -1).view(form.dtype)
    return raw.transpose(1, 2)


def rows(form, kv_cache, head_dim=D) -> dict:
    found = views(kv_cache, form, head_dim)
    scales = {"k_scale": 0.5, "v_scale": 2.0} if form is FP8 else {}
    return {
        "keys": found.keys,
        "values": found.values,
        "key_scales": found.key_scales,
        "value_scales": found.value_scales,
        **scales,
    }


def read(form, kv_cache, head_dim=D) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache as fp32 numbers."""
    found = views(kv_cache, form, head_dim)
    if form is FP8:
        return tuple(x.view(torch.float8_e4m3fn).float() * s for x, s in ((found.keys, 0.5), (found.values, 2.0)))
    if form is INT8:
        pairs = ((found.keys, found.key_scales), (found.values, found.value_scales))
        return tuple(x.float() * s.unsqueeze(-1) for x, s in pairs)
    return found.keys.float(), found.values.float()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def hostile(*shape: int) -> torch.Tensor:
    """Normal numbers with rows of zeros, tiny, huge, equal and single large ones."""
    x = torch.randn(shape)
    flat = x.view(-1, shape[-1])
    flat[0] = 0
    flat[1] *= 1e-33
    flat[2] *= 1e30
    flat[3] = 3.0
    flat[4, 5] = 1e4
    flat[5] *= 1e-20
    return x.bfloat16()


SLOTS = torch.tensor([17, -1, 0, 3, 6, -1, 7, 19])


@FORMS
def test_rows_equal_the_reference(form):
    key, value = hostile(12, KV_HEADS, D), hostile(12, 2 * KV_HEADS, D)[:, ::2]
    caches = [cache(form) for _ in range(2)]
    for module, kv_cache in zip((write, reference), caches):
        module.write_rows(key, value, slots=SLOTS, **rows(form, kv_cache))
    assert torch.equal(bits(caches[0]), bits(caches[1]))


@FORMS
@pytest.mark.parametrize("module", [write, reference], ids=["kernel", "reference"])
def test_only_the_slots_are_written(form, module):
    key = torch.randn(12, KV_HEADS, D).bfloat16()
    kv_cache = cache(form)
    before = bits(kv_cache).clone()
    module.write_rows(key, key, slots=SLOTS, **rows(form, kv_cache))
    changed = (bits(kv_cache) != before).any(-1).any(1)
    want = torch.zeros(20, dtype=torch.bool)
    want[SLOTS[SLOTS >= 0]] = True
    assert torch.equal(changed.flatten(), want)


@FORMS
@pytest.mark.parametrize("module", [write, reference], ids=["kernel", "reference"])
def test_numbers_come_back(form, module):
    """To half a step: 2^-9 of a number (bf16), 2^-4 of one or 2^-10 times the scale (fp8), 1/254 of a row's largest (int8)."""
    key, value = torch.randn(2, 8, KV_HEADS, D).bfloat16()
    kv_cache = cache(form)
    module.write_rows(key, value, slots=SLOTS, **rows(form, kv_cache))
    kept = SLOTS >= 0
    for x, stored, scale in zip((key, value), read(form, kv_cache), (0.5, 2.0)):
        x, stored = x[kept].float(), stored.flatten(0, 1)[SLOTS[kept]]
        largest = x.abs().amax(-1, keepdim=True)
        # The reciprocal is rounded before it multiplies, hence the last factor.
        half = {"bf16": 0 * x, "fp8": (x.abs() / 16).clamp_min(scale / 1024), "int8": largest / 254 * (1 + 1e-4)}
        assert ((stored - x).abs() <= half[form.name]).all()


@pytest.mark.parametrize("module", [write, reference], ids=["kernel", "reference"])
def test_fp8_saturates_at_448_times_the_scale(module):
    """The next number after 448 would be 480, and a plain conversion gives NaN from 464 on."""
    x = torch.tensor([447.0, 448, 449, 464, 466, 480, 1e30, 1e37, -448, -464, -1e9, 0.0]).bfloat16()
    key = torch.zeros(1, KV_HEADS, D).bfloat16()
    key[0, 1, :12] = x * 0.5
    kv_cache = cache(FP8)
    module.write_rows(key, key * 4, slots=torch.tensor([5]), **rows(FP8, kv_cache))
    want = torch.tensor([448.0] * 8 + [-448.0] * 3 + [0.0])
    for stored, scale in zip(read(FP8, kv_cache), (0.5, 2.0)):
        assert torch.equal(stored[1, 1, 1, :12], want * scale)


@FORMS
@pytest.mark.parametrize("module", [write, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("damage", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_damage_stays_visible(form, module, damage):
    """And in its own row: the other head, the other tokens and the value are whole."""
    key, value = torch.randn(2, 2, KV_HEADS, D).bfloat16()
    key[1, 0, 7] = damage
    kv_cache = cache(form)
    module.write_rows(key, value, slots=torch.tensor([4, 5]), **rows(form, kv_cache))
    keys, values = read(form, kv_cache)
    assert not keys[1, 1, 0, 7].isfinite()
    assert keys[1, 1, 1].isfinite().all() and keys[1, 0].isfinite().all() and values[1, :2].isfinite().all()


def projection(tokens: int) -> torch.Tensor:
    """Rows of a wider buffer, as the projection shared with the indexer leaves them."""
    wide = torch.randint(-40, 41, (tokens + 3, 2 * (Q_HEADS + KV_HEADS) * D + 40))
    return wide.bfloat16()[:, : 2 * (Q_HEADS + KV_HEADS) * D]


def table(rotary: int, positions: int = 64) -> torch.Tensor:
    angle = torch.arange(positions).unsqueeze(1) * 10000.0 ** -(torch.arange(0, rotary, 2) / rotary)
    return torch.cat((angle.cos(), angle.sin()), -1).bfloat16()


def arguments(axes: int, rotary: int = 16, tokens: int = 8) -> dict:
    section = (3, 3, 2) if axes == 3 else None
    positions = torch.randint(64, (3, tokens + 3) if axes == 3 else (tokens + 3,))
    return {
        "qkv": projection(tokens),
        "positions": positions,
        "cos_sin": table(rotary),
        "q_weight": torch.randn(D).bfloat16() * 0.1,
        "k_weight": torch.randn(D).bfloat16() * 0.1,
        "eps": 1e-6,
        "slots": SLOTS[:tokens],
        "mrope_section": section,
    }


@FORMS
@pytest.mark.parametrize("axes", [1, 3])
def test_fused_equals_the_reference(form, axes):
    given = arguments(axes)
    caches = [cache(form) for _ in range(2)]
    results = [
        module.norm_rope_gate_write(**given, **rows(form, kv_cache))
        for module, kv_cache in zip((write, reference), caches)
    ]
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert torch.equal(bits(caches[0]), bits(caches[1]))


@pytest.mark.parametrize("tokens, rotary", [(1, 32), (8, 8), (0, 16)])
def test_fused_with_other_shapes(tokens, rotary):
    """All of a head rotated, a quarter, no token at all."""
    given = arguments(1, rotary, tokens)
    caches = [cache(INT8) for _ in range(2)]
    results = [
        module.norm_rope_gate_write(**given, **rows(INT8, kv_cache))
        for module, kv_cache in zip((write, reference), caches)
    ]
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].shape == (tokens, Q_HEADS, D)
    assert torch.equal(bits(caches[0]), bits(caches[1]))


@FORMS
def test_fused_leaves_the_rest_alone(form):
    kv_cache = cache(form)
    before = bits(kv_cache).clone()
    write.norm_rope_gate_write(**arguments(1), **rows(form, kv_cache))
    changed = (bits(kv_cache) != before).any(-1).any(1).flatten()
    assert set(changed.nonzero().flatten().tolist()) == set(SLOTS[SLOTS >= 0].tolist())


@pytest.mark.parametrize("axes", [1, 3])
def test_fused_is_as_near_to_fp64_as_the_unfused_path(axes):
    """The floor: the mean square distance of the layer's own unfused torch path (bf16 rotation) from the same in fp64."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    given = arguments(axes) | {"qkv": torch.randn(11, 2 * (Q_HEADS + KV_HEADS) * D).bfloat16()}
    kv_cache = cache(BF16)
    query, gate = write.norm_rope_gate_write(**given, **rows(BF16, kv_cache))
    kept = SLOTS >= 0
    key = views(kv_cache, BF16, D).keys.flatten(0, 1)[SLOTS[kept]]

    packed = given["qkv"][:8].view(8, -1, D)
    q, k = packed[:, : 2 * Q_HEADS : 2], packed[:, 2 * Q_HEADS : 2 * Q_HEADS + KV_HEADS]
    assert torch.equal(gate, packed[:, 1 : 2 * Q_HEADS : 2])
    assert torch.equal(views(kv_cache, BF16, D).values.flatten(0, 1)[SLOTS[kept]], packed[kept, -KV_HEADS:])
    cos, sin = reference.angles(given["positions"][..., :8], given["cos_sin"], given["mrope_section"])

    def exact(x, weight):
        x = x.double()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())
        rotated = ApplyRotaryEmb.forward_static(x[..., :16], cos.double(), sin.double())
        return torch.cat((rotated, x[..., 16:]), -1)

    def unfused(x, weight):
        x = reference.norm(x, weight, 1e-6)
        rotated = ApplyRotaryEmb.forward_static(x[..., :16], cos.bfloat16(), sin.bfloat16())
        return torch.cat((rotated, x[..., 16:]), -1)

    for got, x, weight, rows_kept in ((query, q, given["q_weight"], slice(None)), (key, k, given["k_weight"], kept)):
        truth = exact(x, weight)[rows_kept]
        floor = (unfused(x, weight)[rows_kept].double() - truth).square().mean()
        assert 0 < (got.double() - truth).square().mean() <= floor


def test_what_does_not_fit_is_refused():
    given = arguments(1)
    ours = rows(INT8, cache(INT8))
    for change, words in (
        ({"qkv": given["qkv"][:, :-1]}, "packed projection"),
        ({"qkv": given["qkv"][:5]}, "packed projection"),
        ({"positions": given["positions"][:5]}, "positions are"),
        ({"positions": given["positions"].expand(3, -1)}, "mrope_section is None"),
        ({"cos_sin": table(64)}, "64 rotated of 32"),
        ({"slots": SLOTS.view(2, 4)}, "slots are"),
        ({"key_scales": None}, "rows of a int8 cache have a scale"),
        ({"value_scales": ours["value_scales"][:2]}, "scales are"),
        ({"values": ours["values"].float()}, "of bfloat16, uint8"),
    ):
        for module in (write, reference):
            with pytest.raises(ValueError, match=words):
                module.norm_rope_gate_write(**{**given, **ours, **change})
    with pytest.raises(ValueError, match="for 8 slots of 2 x 32"):
        write.write_rows(torch.zeros(7, KV_HEADS, D), torch.zeros(7, KV_HEADS, D), slots=SLOTS, **ours)
