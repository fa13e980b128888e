"""Where keys, values and scales lie, against upstream's own packing of the same page."""

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


def cache_of(form, tokens_first: bool):
    """An allocation counting upwards, in either order of heads and tokens in memory."""
    axes = (BLOCKS, SIZE, HEADS) if tokens_first else (BLOCKS, HEADS, SIZE)
    raw = torch.arange(BLOCKS * HEADS * SIZE * form.token_bytes(DIM), dtype=torch.int32).to(torch.uint8)
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
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_views_share_the_cache(form, tokens_first):
    cache = cache_of(form, tokens_first)
    got = views(cache, form, DIM)
    assert got.keys.shape == got.values.shape == (BLOCKS, SIZE, HEADS, DIM)
    half = form.content(DIM) // 2
    for view, start in ((got.keys, 0), (got.values, half)):
        assert view.dtype == form.dtype
        view[2, 3, 1] = 7
        assert (cache[2, 1, 3, start : start + DIM] == 7).all()
    assert (got.key_scales is None) == (got.value_scales is None) == (not form.scaled_rows)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_int8_scales_lie_where_upstream_keeps_them(tokens_first):
    cache = cache_of(INT8, tokens_first)
    upstream = TritonAttentionImpl.__new__(TritonAttentionImpl)
    upstream._ensure_scale_caches(cache)
    got = views(cache, INT8, DIM)
    for ours, theirs in ((got.key_scales, upstream._k_scale_cache), (got.value_scales, upstream._v_scale_cache)):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
        assert ours.data_ptr() == theirs.data_ptr()


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
