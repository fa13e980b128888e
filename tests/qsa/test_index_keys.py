"""Index keys of one byte: every code in a score, rounding where they are written, and what is no number."""

import pytest
import torch

from tests.cpu.qsa_inputs import CudaLooking
from tests.qsa.test_e4m3 import NANS, by_definition, edges
from tests.qsa.test_prepare import D, bound, run, shared, side_caches
from vllm.models.qwen4_exp.compact_kv import impl as layer_impl
from vllm.models.qwen4_exp.compact_kv.choice import Kernels
from vllm.models.qwen4_exp.cpu import qsa as twin
from vllm.models.qwen4_exp.nvidia import model  # noqa: F401  before its parts: they import each other
from vllm.models.qwen4_exp.nvidia.ops import qsa as upstream
from vllm.models.qwen4_exp.qsa import index_keys, score, unpaged
from vllm.models.qwen4_exp.qsa.e4m3 import SCALE
from vllm.models.qwen4_exp.qsa.formats import kv_format
from vllm.triton_utils import tl, triton

E4M3 = torch.float8_e4m3fn
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)
NUMBERS = torch.tensor([by_definition(code) for code in range(256)])
WIDTH, PAGE, MOST = 36, 8, 0x7FFFFFFE


def scored(q: torch.Tensor, keys: torch.Tensor, as_prompt: bool, copied: bool = False) -> torch.Tensor:
    """Scores ``[rows, keys]`` of one request by the kernel, NaN where they are none.  Pages lie in reverse, apart.

    ``copied``: the keys are copied out of their pages first, into numbers that are none.
    """
    groups = len(keys)
    cache = torch.full((2 * groups // PAGE, PAGE, 1, WIDTH), 0x7F, dtype=torch.uint8)
    table = torch.arange(2 * groups // PAGE - 1, 0, -2, dtype=torch.int32).unsqueeze(0)
    cache[table[0].long()] = keys.view(torch.uint8).view(-1, PAGE, 1, WIDTH)
    visible = torch.full((len(q),), groups, dtype=torch.int32)
    columns = -(-groups // score.BLOCK_N) * score.BLOCK_N
    ordered = torch.full((len(q), columns), -7, dtype=torch.int32)
    tops = torch.empty(len(q), columns // score.RUN, dtype=torch.int32)
    starts = torch.tensor([0, len(q)], dtype=torch.int32) if as_prompt else None
    cache = cache.view(E4M3)
    if copied:
        space = torch.full((unpaged.copy_words(1, columns, WIDTH),), -1, dtype=torch.int32)
        cache = unpaged.unpaged(cache, table, starts, visible, columns, 0, space)
    score.score_groups(q, cache, table, starts, 0 if as_prompt else len(q), len(q), visible, 0, 0, ordered, tops)
    found = ordered[:, :groups]
    return torch.where(found == MOST, torch.nan, found.view(torch.float32)) / SCALE**2


def random_numbers(*shape: int) -> torch.Tensor:
    """e4m3, all of them finite."""
    return (torch.randint(0, 0x7F, shape) | torch.randint(0, 2, shape) << 7).to(torch.uint8).view(E4M3)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("as_prompt", "copied"), [(False, False), (True, False), (True, True)], ids=["decode", "prompt", "copied"]
)
def test_every_code_of_a_key_in_a_score(as_prompt, copied):
    """In every byte of a word and in the last word, beside other numbers times zero: its size, from two heads."""
    torch.manual_seed(0)
    dims = [0, 1, 2, 3, WIDTH - 1]
    keys, q = random_numbers(len(dims) * 256, WIDTH), torch.zeros(len(dims), 3, WIDTH).to(E4M3)
    for number, dim in enumerate(dims):
        keys.view(torch.uint8)[number * 256 : (number + 1) * 256, dim] = ALL
        q[number, 0, dim], q[number, 1, dim] = 1.0, -1.0
    got = torch.cat([scored(q[i : i + 1], keys[256 * i : 256 * i + 256], as_prompt, copied) for i in range(len(dims))])
    torch.testing.assert_close(got, NUMBERS.abs().expand_as(got), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("copied", [False, True], ids=["paged", "copied"])
def test_every_code_of_a_query_in_a_score(copied):
    """64 rows a tile and heads that are padded: none sees another's codes."""
    keys, q = torch.zeros(PAGE, WIDTH).to(E4M3), torch.zeros(256, 3, WIDTH).to(E4M3)
    keys[3, WIDTH - 2] = 0.5
    q.view(torch.uint8)[:, 1, WIDTH - 2] = ALL
    got = scored(q, keys, as_prompt=True, copied=copied)
    torch.testing.assert_close(got[:, 3], NUMBERS.clamp(min=0) / 2, rtol=0, atol=0, equal_nan=True)
    damaged = got.isnan().all(1)
    assert set(damaged.nonzero().flatten().tolist()) == NANS and not got[~damaged][:, :3].any()


@pytest.mark.parametrize("copied", [False, True], ids=["paged", "copied"])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_scores_are_those_of_the_definition(heads, copied):
    """Random numbers of all sizes; the kernel sums even dimensions before odd ones, in fp32."""
    torch.manual_seed(1)
    keys, q = random_numbers(72, WIDTH), random_numbers(5, heads, WIDTH)
    parts = torch.relu(q.double() @ keys.double().T).sum(1)
    sizes = (q.double().abs() @ keys.double().abs().T).sum(1)
    got = scored(q, keys, as_prompt=True, copied=copied)
    assert ((got - parts).abs() <= WIDTH * 2**-24 * sizes).all()


@triton.jit
def store_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, index_keys.as_stored(tl.load(x + at), out))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_alike(source):
    x = edges().to(source)
    stored, wide = torch.zeros(len(x)).to(E4M3), torch.zeros(len(x)).to(source)
    store_kernel[(1,)](x, stored.view(torch.uint8), N=len(x))
    store_kernel[(1,)](x, wide, N=len(x))
    torch.testing.assert_close(stored.float(), index_keys.rounded(x, E4M3).float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wide, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_rounding_saturates_and_keeps_damage(source):
    x = edges().to(source)
    got = index_keys.rounded(x, E4M3).float()
    sound = x.isfinite()
    assert got[~sound].isnan().all() and got[sound].isfinite().all() and got.abs().nan_to_num().max() == 448
    middle = x.float()[sound].abs().clamp(max=448)
    # The nearest number: none is nearer.
    sizes = NUMBERS[:0x7F]
    assert torch.equal((got[sound].abs() - middle).abs(), (sizes[None] - middle[:, None]).abs().min(1).values)


def built(monkeypatch, cache_dtype: str, kernels: Kernels):
    """A layer's implementation as a GPU builds it, on a stand-in for upstream's class."""
    monkeypatch.setattr(layer_impl, "choose", lambda name: (kv_format(name), kernels))

    class Upstream:
        def __init__(self, heads, head_size, *rest):
            self.head_size = head_size

    return layer_impl.own_impl(Upstream)(2, D, 1.0, 2, None, None, cache_dtype)


def prepared(impl, given: dict, dtype: torch.dtype) -> dict:
    sides = side_caches()
    for name in ("q_out", "compressed_cache"):
        sides[name] = sides[name].to(dtype)
    run(impl.prepare, given, sides, bound(impl.form))
    return sides


@pytest.mark.parametrize(
    ("cache_dtype", "kernels"), [("auto", Kernels.UPSTREAM), ("int8_per_token_head", Kernels.OURS)], ids=str
)
def test_the_fused_write_rounds_what_it_would_have_stored(monkeypatch, cache_dtype, kernels):
    """Queries and the one complete group, some beyond the largest number; the ring of raw keys stays as it is."""
    impl = built(monkeypatch, cache_dtype, kernels)
    given = shared(1)
    given["q_norm_weight"] += 300.0
    given["k_norm_weight"] += 300.0
    wide, narrow = prepared(impl, given, torch.bfloat16), prepared(impl, given, E4M3)
    for name in ("q_out", "compressed_cache"):
        want = index_keys.rounded(wide[name], E4M3)
        assert (wide[name].abs() > 500).any() and want.float().nan_to_num().abs().max() == 448
        # The sign of a NaN, which nobody wrote or reads, is not compared.
        assert torch.equal(narrow[name].float().nan_to_num(-1e9), want.float().nan_to_num(-1e9)), name
    assert torch.equal(narrow["state_cache"].view(torch.uint8), wide["state_cache"].view(torch.uint8))


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_the_fused_write_keeps_damage(monkeypatch, damage):
    impl, given = built(monkeypatch, "auto", Kernels.UPSTREAM), shared(1)
    given["k"][2, 7] = damage
    given["q"][1, 9] = damage
    sides = prepared(impl, given, E4M3)
    key, query = sides["compressed_cache"].float()[1, 0], sides["q_out"].float()
    assert key.isnan().any() and query[1, 0].isnan().any()
    assert query[[0, 2, 3, 4]].isfinite().all() and query[1, 1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
def test_rows_are_stored_alike_on_both_platforms(monkeypatch, dtype):
    """The path without the fused write: upstream's kernel moves codes, the CPU's twin too."""
    store = upstream.qsa_store_cache_rows
    monkeypatch.setattr(
        upstream, "qsa_store_cache_rows", lambda cache, *rest: store(cache.as_subclass(CudaLooking), *rest)
    )
    rows = torch.cat([torch.randn(4, 1, 24) * 300, torch.full((1, 1, 24), torch.nan)]).bfloat16()
    rows[3, 0, 5] = torch.inf
    slots = torch.tensor([7, -1, 0, 23, 5])
    caches = [torch.zeros(6, 4, 1, 27).to(dtype)[..., :24] for _ in range(2)]
    twin.qsa_store_cache_rows(caches[0], slots, rows)
    index_keys.qsa_store_cache_rows(caches[1], slots, rows)
    torch.testing.assert_close(*(cache.float() for cache in caches), rtol=0, atol=0, equal_nan=True)
    kept = caches[0].float().flatten(0, 1)[[7, 0, 23, 5], 0]
    want = index_keys.rounded(rows[[0, 2, 3, 4], 0], dtype).float()
    torch.testing.assert_close(kept, want, rtol=0, atol=0, equal_nan=True)
    assert kept[3].isnan().all() and not kept[2, 5].isfinite()


def test_rows_that_are_no_whole_words_are_refused():
    for rows in (torch.zeros(2, 32).to(E4M3)[:, 1:25], torch.zeros(2, 30).to(E4M3)):
        with pytest.raises(RuntimeError):
            index_keys.words(rows)
