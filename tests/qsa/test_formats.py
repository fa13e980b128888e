"""Where keys, values and scales lie."""

import itertools
import math

import pytest
import torch

from vllm.models.qwen4_exp.qsa.formats import (
    BF16,
    CACHE_DTYPES,
    FP8,
    INT8,
    UnknownCacheDtype,
    WrongCache,
    kv_format,
    views,
)
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

DIM, BLOCKS, HEADS, SIZE = 16, 3, 2, 4
FORMATS = [BF16, FP8, INT8]


def cache_of(form, tokens_first: bool, heads: int = HEADS):
    """An allocation counting upwards, in either order of heads and tokens in memory."""
    axes = (BLOCKS, SIZE, heads) if tokens_first else (BLOCKS, heads, SIZE)
    raw = torch.arange(BLOCKS * heads * SIZE * form.token_bytes(DIM), dtype=torch.int32).to(torch.uint8)
    whole = raw.view(form.dtype).view(*axes, form.content(DIM))
    return whole.transpose(1, 2) if tokens_first else whole


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_storage_is_what_vllm_allocates(cache_dtype):
    if cache_dtype != "auto":
        assert kv_format(cache_dtype).dtype == STR_DTYPE_TO_TORCH_DTYPE[cache_dtype]


def test_bytes_at_the_published_width():
    assert [form.token_bytes(256) for form in FORMATS] == [1024, 512, 520]


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(UnknownCacheDtype, match="fp8_e5m2.*int8_per_token_head"):
        kv_format("fp8_e5m2")


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("form", [BF16, FP8], ids=lambda f: f.name)
def test_views_share_the_cache(form, tokens_first):
    cache = cache_of(form, tokens_first)
    got = views(cache, form, DIM)
    assert got.keys.shape == got.values.shape == (BLOCKS, SIZE, HEADS, DIM)
    for view, start in ((got.keys, 0), (got.values, DIM)):
        assert view.dtype == form.dtype
        view[2, 3, 1] = 7
        assert (cache[2, 1, 3, start : start + DIM] == 7).all()
    assert got.key_scales is got.value_scales is None


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_int8_numbers_come_before_scales(tokens_first, heads):
    """Of every head that lies in the same token, and of each by itself where heads lie apart."""
    cache = cache_of(INT8, tokens_first, heads)
    memory = cache.transpose(1, 2).reshape(-1) if tokens_first else cache.reshape(-1)
    got = views(cache, INT8, DIM)
    together, content = (heads if tokens_first else 1), INT8.content(DIM)
    for block, token, head in itertools.product(range(BLOCKS), range(SIZE), range(heads)):
        first = (block * SIZE + token) * heads if tokens_first else (block * heads + head) * SIZE + token
        place = head if tokens_first else 0
        for number, (rows, scales) in enumerate(((got.keys, got.key_scales), (got.values, got.value_scales))):
            at = first * content + (2 * place + number) * DIM
            row = rows[block, token, head]
            assert row.data_ptr() == memory.data_ptr() + at and torch.equal(row, memory[at : at + DIM])
            at = first * content + together * 2 * DIM + (2 * place + number) * 4
            scale = scales[block, token, head]
            assert scale.dtype == torch.float32 and scale.data_ptr() == memory.data_ptr() + at


def test_int8_takes_upstreams_bytes():
    """The planner's pages are upstream's: its scales are as many, and end where ours do."""
    cache = cache_of(INT8, True)
    upstream = TritonAttentionImpl.__new__(TritonAttentionImpl)
    upstream._ensure_scale_caches(cache)
    got = views(cache, INT8, DIM)
    for ours, theirs in ((got.key_scales, upstream._k_scale_cache), (got.value_scales, upstream._v_scale_cache)):
        assert ours.shape == theirs.shape and ours.stride()[:2] == theirs.stride()[:2]
    assert got.value_scales[-1, -1, -1].data_ptr() == upstream._v_scale_cache[-1, -1, -1].data_ptr()


@pytest.mark.parametrize(("heads", "tokens_first", "step"), [(2, True, 16), (2, False, 8), (1, True, 8), (3, True, 8)])
def test_int8_rows_of_the_published_width_begin_where_copies_are_wide(heads, tokens_first, step):
    axes = (BLOCKS, SIZE, heads) if tokens_first else (BLOCKS, heads, SIZE)
    cache = torch.empty(*axes, INT8.content(256), dtype=torch.int8)
    got = views(cache.transpose(1, 2) if tokens_first else cache, INT8, 256)
    every = list(itertools.product(range(BLOCKS), range(SIZE), range(heads)))
    assert math.gcd(16, *(rows[at].data_ptr() for rows in (got.keys, got.values) for at in every)) == step


def test_scales_of_a_layer_inside_a_larger_block():
    """Layers share a pool: a layer starts inside a block, and blocks are further apart."""
    pool = torch.zeros(BLOCKS, 40 + HEADS * SIZE * INT8.content(DIM) + 64, dtype=torch.int8)
    cache = pool[:, 40 : 40 + HEADS * SIZE * INT8.content(DIM)].view(BLOCKS, HEADS, SIZE, -1)
    got = views(cache, INT8, DIM)
    got.value_scales[1, 2, 1] = 0.5
    assert cache[1, 1, 2, -4:].tolist() == torch.tensor([0.5]).view(torch.int8).tolist()
    assert pool.count_nonzero() == 1  # 0.5 is 0x3F000000


@pytest.mark.parametrize(
    "cache, reason",
    [
        (torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=torch.int8), r"\[blocks, kv_heads, block_size, 40\].*32"),
        (torch.zeros(BLOCKS, HEADS, SIZE, 40, dtype=torch.uint8), "uint8"),
        (torch.zeros(HEADS, SIZE, 40, dtype=torch.int8), "got .2, 4, 40"),
        (torch.zeros(BLOCKS, HEADS, 40, SIZE, dtype=torch.int8).transpose(2, 3), "last axis"),
        (torch.zeros(BLOCKS * HEADS * SIZE * 40 + 2, dtype=torch.int8)[2:].view(BLOCKS, HEADS, SIZE, 40), "4-byte"),
    ],
)
def test_what_is_not_such_a_cache_is_refused(cache, reason):
    with pytest.raises(WrongCache, match=reason):
        views(cache, INT8, DIM)
