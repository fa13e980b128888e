"""The kernels, interpreted, against the reference; tolerances are multiples of a noise floor.

The floor is what rounding to bf16 costs the reference itself: its result in bf16 against
its result in float32, which rounds twice, before and after the gate.  The kernels round
once more, probabilities to bf16 or fp16.  That is an error of the same size, so twice
the floor is allowed, in root mean square and at the worst element.
"""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import joining, launch, reference
from vllm.models.qwen4_exp.qsa.attention import sparse_paged_attention
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, KVViews, views
from vllm.models.qwen4_exp.qsa.host_kv.lines import by_head, whole_lines
from vllm.models.qwen4_exp.qsa.launch import WrongInput, rows_of
from vllm.models.qwen4_exp.qsa.tiles import Tile

from .scene import scene, store

FORMATS = [BF16, FP8, INT8]
EACH_FORMAT = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
# The budget is 64 and the open group has at most 3 tokens: its edge, a split's and a tile's.
BUDGET, WIDTH = 64, 67
COUNTS = [1, 0, 16, 33, BUDGET - 1, BUDGET, BUDGET + 1, WIDTH]


def exact(made) -> torch.Tensor:
    made = made.__class__(**(made.__dict__ | {"q": made.q.float()}))
    return made.call(reference.sparse_paged_attention)


def assert_within_floor(got: torch.Tensor, made, times: float = 2.0) -> None:
    want, rounded = exact(made), made.call(reference.sparse_paged_attention).float()
    assert want.isfinite().all() and got.isfinite().all()
    error, floor = (got.float() - want).abs(), (rounded - want).abs()
    assert floor.max() > 0
    assert error.square().mean().sqrt() <= times * floor.square().mean().sqrt()
    assert error.max() <= times * floor.max()


@EACH_FORMAT
def test_equals_the_reference_and_itself(form):
    made = scene(form, COUNTS, width=WIDTH)
    decode, prefill = (made.call(sparse_paged_attention, prefill) for prefill in (False, True))
    assert_within_floor(decode, made)
    assert torch.equal(decode, prefill), "a row is the same in both kernels, bit for bit"
    assert (decode[COUNTS.index(0)] == 0).all()


@EACH_FORMAT
@pytest.mark.parametrize("rows_at_a_time", [2, 4])
def test_states_lie_in_a_workspace_that_others_wrote(form, rows_at_a_time, monkeypatch):
    """Of three splits rows have none, one, two or all; the rest of the buffer holds NaN, or what the step before left."""
    made = scene(form, [0, 5, 33, WIDTH, 1, 40, 0], width=WIDTH)
    want = made.call(sparse_paged_attention, True)
    # Three splits of six heads, in numbers of which four are a step.
    space = torch.full((rows_at_a_time * 20 * 66 + 19,), torch.nan).view(torch.int32)
    monkeypatch.setattr(joining, "indexer_workspace", lambda device, row_bytes: space)
    for _ in range(2):
        assert torch.equal(made.call(sparse_paged_attention), want)
    starts = [part.start for part, *_ in joining.split_states(7, 6, 3, 64, torch.device("cpu"))]
    assert starts == list(range(0, 7, rows_at_a_time))


def test_states_begin_at_multiples_of_16_bytes(monkeypatch):
    space = torch.zeros(10_000, dtype=torch.int32)
    monkeypatch.setattr(joining, "indexer_workspace", lambda device, row_bytes: space)
    for _, *states in joining.split_states(9, 3, 5, 64, torch.device("cpu")):
        assert len({len(state) for state in states}) == 1
        assert [(state.data_ptr() - space.data_ptr()) % 16 for state in states] == [0, 0, 0]
        ends = [state.data_ptr() + 4 * state.numel() for state in states]
        assert ends[0] <= states[1].data_ptr() < ends[1] <= states[2].data_ptr() < ends[2] <= space.data_ptr() + 40_000


@EACH_FORMAT
def test_real_widths(form):
    """24 query heads on 2 K/V heads of 256, blocks of a size that is no power of two."""
    made = scene(form, [35, 9], width=40, group=12, dim=256, size=48)
    assert_within_floor(made.call(sparse_paged_attention), made)


@EACH_FORMAT
@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_does_not_see_its_neighbours(form, prefill):
    made = scene(form, [40, 3, 67], width=WIDTH)
    together = made.call(sparse_paged_attention, prefill)
    for row in range(3):
        alone = made.call(sparse_paged_attention, prefill, slice(row, row + 1))
        assert torch.equal(alone[0], together[row])
    # Padding: rows of no request, whose lists are what an earlier step left there.
    made.token_to_req[1] = -1
    made.selected[1, :] = 2**30
    padded = made.call(sparse_paged_attention, prefill)
    assert torch.equal(padded[[0, 2]], together[[0, 2]]) and (padded[1] == 0).all()


@pytest.mark.parametrize("prefill", [False, True])
def test_blocks_that_are_not_there_do_not_count(prefill):
    made = scene(INT8, [40, 40], width=40, lengths=[40, 40])
    assert made.block_table.max() == made.cache.shape[0] - 1, "the pool's last block is in use"
    gone = made.block_table.clone()
    gone[0, 1], gone[1, 0] = -1, made.cache.shape[0]
    fewer = made.__class__(**(made.__dict__ | {"block_table": gone}))
    got = fewer.call(sparse_paged_attention, prefill)
    for row, page in ((0, 1), (1, 0)):
        kept = [t for t in made.selected[row, :40].tolist() if t // 16 != page]
        made.selected[row, : len(kept)] = torch.tensor(kept)
        made.selected[row, -1] = len(kept)
    assert_within_floor(got, made)


@EACH_FORMAT
@pytest.mark.parametrize("prefill", [False, True])
def test_nan_in_a_selected_row_stays_in_its_row_and_head(form, prefill):
    made = scene(form, [20, 20], width=24)
    kv, token = views(made.cache, form, 64), int(made.selected[0, 7])
    slot = int(made.block_table[0, token // 16]), token % 16, 1
    if form is INT8:
        kv.value_scales[slot] = torch.nan
    else:
        kv.values[slot] = torch.full((64,), torch.nan) if form is BF16 else torch.full((64,), 0x7F)
    out = made.call(sparse_paged_attention, prefill)
    assert out[0, 3:].isnan().all()
    assert out[0, :3].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("form", [FP8, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("prefill", [False, True])
def test_a_nan_key_comes_out_in_its_group(form, prefill):
    made = scene(form, [20], width=24)
    kv, token = views(made.cache, form, 64), int(made.selected[0, 7])
    slot = int(made.block_table[0, token // 16]), token % 16, 0
    if form is INT8:
        kv.key_scales[slot] = torch.nan
    else:
        # One number of 64: products with it are infinite, of either sign.
        kv.keys[slot][5] = 0x7F
    out = made.call(sparse_paged_attention, prefill)
    assert out[0, :3].isnan().all() and out[0, 3:].isfinite().all()


@EACH_FORMAT
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_damaged_query_comes_out_in_its_head(form, damage):
    made = scene(form, [20, 20], width=24)
    made.q[0, 4, 7] = damage
    for prefill in (False, True):
        out = made.call(sparse_paged_attention, prefill)
        assert out[0, 4].isnan().all()
        assert out[0, [0, 1, 2, 3, 5]].isfinite().all() and out[1].isfinite().all()


def test_large_and_small_numbers_of_int8_rows():
    """Scales over ten orders of magnitude, and queries beyond what fp16 holds."""
    made = scene(INT8, [60, 60], width=WIDTH)
    kv = views(made.cache, INT8, 64)
    for request in range(2):
        for token in range(63):
            block, place = int(made.block_table[request, token // 16]), token % 16
            key, value = made.keys[request, token], made.values[request, token]
            store(kv, INT8, block, place, key * 2.0**-18, value * 10.0 ** (token % 11 - 5))
    made.q *= 2.0**18
    assert_within_floor(made.call(sparse_paged_attention), made)


@EACH_FORMAT
@pytest.mark.parametrize("prefill", [False, True])
def test_a_layer_of_a_shared_pool(form, prefill):
    """Layers lie side by side in a block: odd starts, and block strides of no round number."""
    made = scene(form, [35, 5], width=40)
    whole = made.call(sparse_paged_attention, prefill)
    bytes_ = made.cache.reshape(made.cache.shape[0], -1).view(torch.uint8)
    pool = torch.full((len(bytes_), bytes_.shape[1] + 12), 0xFF, dtype=torch.uint8)
    pool[:, 4:-8] = bytes_
    made.cache = pool[:, 4:-8].view(form.dtype).view(made.cache.shape)
    assert made.cache.data_ptr() % 16
    assert not rows_of(*views(made.cache, form, 64)).layout.paired_scales, "a start of 4 and more, by 8"
    assert torch.equal(made.call(sparse_paged_attention, prefill), whole)


def elsewhere(made, order: str) -> KVViews:
    """The int8 rows of ``made`` in another order of bytes."""
    blocks, heads, size, content = made.cache.shape
    dim = made.q.shape[2]
    cache = torch.full((blocks, size, heads, content), -1, dtype=torch.int8)
    if order == "heads inside tokens":
        moved = views(cache.transpose(1, 2), INT8, dim)
    elif order == "in whole lines":  # of host memory
        rows = torch.full((blocks, size, whole_lines(heads * content)), -1, dtype=torch.uint8)
        moved = views(by_head(rows, heads, content, torch.int8), INT8, dim)
    else:  # upstream's, each scale behind its row
        half = content // 2
        scales = (cache[..., at : at + 4].view(torch.float32).squeeze(-1) for at in (dim, half + dim))
        moved = KVViews(cache[..., :dim], cache[..., half : half + dim], *scales)
    for new, old in zip(moved, views(made.cache, INT8, dim)):
        new.copy_(old)
    return moved


@pytest.mark.parametrize("order", ["heads inside tokens", "in whole lines", "upstream's"])
@pytest.mark.parametrize("prefill", [False, True])
def test_results_do_not_depend_on_where_int8_rows_lie(order, prefill):
    made = scene(INT8, [35, 5, WIDTH], width=WIDTH)
    want = made.call(sparse_paged_attention, prefill)
    keys, values, key_scales, value_scales = elsewhere(made, order)
    paired = rows_of(keys, values, key_scales, value_scales).layout.paired_scales
    assert paired == (order != "upstream's"), "both scales by one load"
    assert keys.stride() != views(made.cache, INT8, 64).keys.stride()
    got = sparse_paged_attention(
        made.q, keys, values, *made.paged[2:], torch.full_like(made.q, torch.nan), output_gate=made.gate,
        key_scales=key_scales, value_scales=value_scales, prefill=prefill,
    )  # fmt: skip
    assert torch.equal(got, want)


@pytest.mark.parametrize("start, stride, paired", [(0, 0, True), (8, 24, True), (4, 0, False), (0, 4, False)])
def test_scales_are_read_together_where_8_bytes_are_aligned(start, stride, paired):
    """A layer that begins so many bytes into a block, and blocks so much farther apart than they have bytes."""
    size = 2 * 16 * INT8.content(64)
    pool = torch.zeros(3, size + stride + 16, dtype=torch.int8).view(-1)
    cache = pool[start:].as_strided((3, 2, 16, INT8.content(64)), (size + stride, 136, 272, 1))
    assert rows_of(*views(cache, INT8, 64)).layout.paired_scales == paired


def test_offsets_beyond_32_bits():
    made = scene(FP8, [10], width=12)
    want = made.call(sparse_paged_attention)
    # Untouched memory costs nothing: blocks are 4 GiB apart.
    blocks, apart, per_block = made.cache.shape[0], 2**32, made.cache[0].numel()
    far = torch.empty((blocks - 1) * apart + per_block, dtype=torch.uint8)
    made.cache, near = far.as_strided(made.cache.shape, (apart, *made.cache.stride()[1:])), made.cache
    made.cache.copy_(near)
    assert torch.equal(made.call(sparse_paged_attention), want)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("prefill", [False, True])
def test_places_beyond_32_bits(prefill, axis):
    """Blocks or heads of int8 rows 4 GiB and a word apart: a word is the only step that all rows share."""
    made = scene(INT8, [10], width=12, kv_heads=3, seed=1)
    want = made.call(sparse_paged_attention, prefill)
    strides = list(made.cache.stride())
    strides[1 - axis], strides[axis] = strides[1], 2**32 + 4
    far = torch.empty(8 * 2**30 + made.cache.numel() + 8, dtype=torch.int8)
    made.cache, near = far.as_strided(made.cache.shape, strides), made.cache
    made.cache.copy_(near)
    assert rows_of(*views(made.cache, INT8, 64)).layout.within_bits == 4
    assert made.block_table[0, 0] == 2, "the last block's rows are read"
    assert torch.equal(made.call(sparse_paged_attention, prefill), want)


@EACH_FORMAT
def test_places_of_either_kind_are_the_same_rows(form, monkeypatch):
    made = scene(form, [1, 33, WIDTH], width=WIDTH, size=24)
    want = made.call(sparse_paged_attention)
    monkeypatch.setattr(launch, "_INT32", 0)
    assert rows_of(*views(made.cache, form, 64)).layout.within_bits == 5
    for prefill in (False, True):
        assert torch.equal(made.call(sparse_paged_attention, prefill), want)


def test_tiles_change_the_order_and_nothing_else():
    made = scene(INT8, [67, 20], width=WIDTH)
    tile = Tile(32, 32, 4, 2, 2)

    def with_tile(*args, **kwargs):
        return sparse_paged_attention(*args, **kwargs, tile=tile)

    got = made.call(with_tile)
    assert_within_floor(got, made)
    assert torch.equal(got, made.call(with_tile, True))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"q": torch.zeros(1, 5, 64).bfloat16()}, "query heads: expected a multiple of 2"),
        ({"q": torch.zeros(1, 6, 64).half()}, "dtype of queries"),
        ({"q": torch.zeros(1, 6, 32).bfloat16()}, r"queries: expected \[rows, heads, 64\]"),
        ({"values": torch.zeros(7, 16, 2, 64, dtype=torch.int8)}, "shape of values"),
        ({"key_scales": None}, "key_scales of int8 rows: expected True, got None"),
        ({"value_scales": torch.zeros(3, 16, 2).half()}, "dtype of value_scales"),
        ({"selected": torch.zeros(2, 5, dtype=torch.int32)}, r"selected: expected \[1, width \+ 1\]"),
        ({"selected": torch.zeros(1, 1, dtype=torch.int32)}, "columns of selected"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int64)}, "dtype of block_table"),
        ({"token_to_req": torch.zeros(2, dtype=torch.int32)}, "token_to_req"),
        ({"output_gate": torch.zeros(1, 5, 64)}, "output_gate"),
        ({"out": torch.zeros(1, 6, 16)}, "shape of out"),
        ({"keys": torch.zeros(3, 16, 2, 64)}, "dtype of keys"),
    ],
)
def test_what_does_not_fit_is_refused(change, reason):
    made = scene(INT8, [5], width=8)
    names = ("keys", "values", "selected", "block_table", "token_to_req")
    arguments = dict(zip(names, made.paged)) | made.stored | {"q": made.q, "output_gate": made.gate}
    arguments |= {"out": torch.zeros_like(made.q)} | change
    with pytest.raises(WrongInput, match=reason):
        sparse_paged_attention(**arguments, prefill=False)
