"""Upstream's prepare kernel, with its main part and with ours in its place, interpreted."""

from functools import partial

import pytest
import torch

from vllm.models.qwen4_exp.compact_kv.prepare import prepare
from vllm.models.qwen4_exp.nvidia import model  # noqa: F401  before its parts: they import each other
from vllm.models.qwen4_exp.nvidia.ops.qsa_prepare import qsa_prepare as upstream
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, views
from vllm.models.qwen4_exp.qsa.write.reference import quantized_rows

TOKENS, RATIO, PAGE, D, Q_HEADS, KV_HEADS = 5, 4, 16, 128, 2, 2


def side_caches() -> dict:
    """What the indexer's part reads and writes: a prompt of five tokens, one group of four."""
    return {
        "q_out": torch.full((TOKENS, 4, 128), torch.nan).bfloat16(),
        "state_cache": torch.full((3, 4, 1, 128), torch.nan).bfloat16().squeeze(2),
        "state_slots": torch.arange(4, 4 + TOKENS) % 4 + 4,
        "state_block_table": torch.ones(1, 1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, TOKENS], dtype=torch.int32),
        "logical_positions": torch.arange(TOKENS),
        "compressed_cache": torch.full((2, 4, 1, 128), torch.nan).bfloat16().squeeze(2),
        "compressed_slots": torch.tensor([-1, -1, -1, 4, -1]),
        "k_work_metadata": torch.tensor([[0, 0]], dtype=torch.int32),
    }


def shared(axes: int) -> dict:
    torch.manual_seed(0)
    angle = torch.arange(64).unsqueeze(1) * 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    wide = torch.randint(-9, 10, (TOKENS, 2 * (Q_HEADS + KV_HEADS) * D)).bfloat16()
    return {
        "q": torch.randn(TOKENS, 512).bfloat16(),
        "k": torch.randn(TOKENS, 128).bfloat16(),
        "positions": torch.randint(64, (3, TOKENS)) if axes == 3 else torch.arange(TOKENS),
        "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), -1).bfloat16(),
        "q_norm_weight": torch.randn(128).bfloat16() * 0.1,
        "k_norm_weight": torch.randn(128).bfloat16() * 0.1,
        "eps": 1e-6,
        "compress_ratio": RATIO,
        "mrope_section": (12, 10, 10) if axes == 3 else None,
        "rope_pos_offset": None,
        "main_qkv": wide,
        "main_q_norm_weight": torch.randn(D).bfloat16() * 0.1,
        "main_k_norm_weight": torch.randn(D).bfloat16() * 0.1,
        "main_eps": 1e-6,
        "main_slot_mapping": torch.arange(3, 3 + TOKENS),
        "main_k_scale": 0.25,
        "main_v_scale": 4.0,
    }


POSITIONAL = (
    "q k positions cos_sin_cache q_norm_weight k_norm_weight eps q_out state_cache state_slots state_block_table"
)
POSITIONAL = f"{POSITIONAL} query_start_loc logical_positions compressed_cache compressed_slots k_work_metadata".split()


def run(function, given, sides, main_kv_cache):
    """As the indexer calls it: the first sixteen by position."""
    everything = given | sides | {"main_kv_cache": main_kv_cache}
    first = [everything.pop(name) for name in POSITIONAL]
    return function(*first, **everything)


def bound(form) -> torch.Tensor:
    raw = torch.zeros(2, KV_HEADS, PAGE, form.content(D), dtype=form.dtype)
    return raw.transpose(1, 2)


@pytest.mark.parametrize("form, axes", [(INT8, 1), (FP8, 3)], ids=["int8", "fp8 of three axes"])
def test_both_parts_equal_upstreams(form, axes):
    given = shared(axes)
    theirs, ours = side_caches(), side_caches()
    want_cache = bound(BF16)
    want = run(upstream, given, theirs, want_cache)
    cache = bound(form)
    both = partial(prepare, form, D)
    got = run(both, given, ours, cache.view(torch.float8_e4m3fn) if form is FP8 else cache)
    for name, tensor in theirs.items():
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])
    plain, stored = views(want_cache.transpose(1, 2), BF16, D), views(cache.transpose(1, 2), form, D)
    for number, scale in ((0, 0.25), (1, 4.0)):
        codes, scales = quantized_rows(plain[number], form.dtype, scale)
        written = torch.zeros(2, PAGE, dtype=torch.bool)
        written.view(-1)[given["main_slot_mapping"]] = True
        assert torch.equal(stored[number][written], codes[written])
        assert not stored[number][~written].any()
        if scales is not None:
            assert torch.equal(stored[number + 2][written], scales[written])
