"""Attention over sections is attention over rows in place, whatever the arena, and reads every needed row once."""

from __future__ import annotations

import random

import pytest
import torch

from vllm.models.qwen4_exp.qsa.formats import BF16, INT8, views
from vllm.models.qwen4_exp.qsa.host_kv import running
from vllm.models.qwen4_exp.qsa.host_kv.arena import Arena
from vllm.models.qwen4_exp.qsa.host_kv.layer import rows_view
from vllm.models.qwen4_exp.qsa.host_kv.prompt import prompt_attention, section_bound
from vllm.models.qwen4_exp.qsa.host_kv.union import BEYOND, rows_of_section, union_of
from vllm.models.qwen4_exp.qsa.reference import sparse_paged_attention

from .planning import rows

CPU = torch.device("cpu")
RATIO, BLOCK, HEADS, KV_HEADS, WIDTH = 4, 32, 4, 2, 16
BUDGET = 24


class Batch:
    """Requests in the middle of a prompt: blocks in random order, selections as the indexer packs them.

    Rows that no request has written, and everything selections leave unused, hold NaN or a number that no index may be.
    """

    def __init__(self, contexts: list[int], chunks: list[int], seed: int = 0, blocks: int = 40) -> None:
        source = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        spec = rows(BLOCK, KV_HEADS, WIDTH)
        memory = torch.empty(blocks * spec.page_size_bytes, dtype=torch.uint8)
        self.kv_cache = rows_view(memory, spec, blocks)
        self.kv_cache.fill_(torch.nan)
        numbers = source.sample(range(1, blocks), sum(-(-n // BLOCK) for n in contexts))
        longest = max(-(-n // BLOCK) for n in contexts)
        self.block_table = torch.full((len(contexts), longest), 10**6, dtype=torch.int32)
        selected, owners = [], []
        for request, (context, chunk) in enumerate(zip(contexts, chunks, strict=True)):
            mine, numbers = numbers[: -(-context // BLOCK)], numbers[-(-context // BLOCK) :]
            self.block_table[request, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            for position in range(context):
                row = torch.randn(KV_HEADS, 2 * WIDTH, generator=generator).bfloat16()
                self.kv_cache[mine[position // BLOCK], :, position % BLOCK] = row
            for position in range(context - chunk, context):
                whole = (position + 1) // RATIO
                groups = source.sample(range(whole), min(whole, BUDGET // RATIO))
                tokens = [group * RATIO + r for group in groups for r in range(RATIO)]
                tokens += range(whole * RATIO, position + 1)
                selected.append(tokens + [-1] * (BUDGET + RATIO - 1 - len(tokens)) + [len(tokens)])
                owners.append(request)
        self.contexts = sum(contexts)
        self.selected = torch.tensor(selected, dtype=torch.int32)
        self.token_to_req = torch.tensor(owners, dtype=torch.int32)
        self.q = torch.randn(len(owners), HEADS, WIDTH, generator=generator).bfloat16()
        self.gate = torch.randn(len(owners), HEADS * WIDTH, generator=generator).bfloat16()

    def in_place(self) -> torch.Tensor:
        """Every token reads its rows itself."""
        keys, values, _, _ = views(self.kv_cache, BF16, WIDTH)
        return sparse_paged_attention(
            self.q, keys, values, self.selected, self.block_table, self.token_to_req, torch.empty_like(self.q),
            output_gate=self.gate,
        )  # fmt: skip

    def over_sections(self, arena_bytes: int) -> torch.Tensor:
        return prompt_attention(
            self.q, self.kv_cache, BF16, self.selected, self.block_table, self.token_to_req, RATIO, self.contexts,
            Arena(arena_bytes, CPU), torch.full_like(self.q, torch.nan), output_gate=self.gate,
        )  # fmt: skip


GROUP_BYTES = RATIO * KV_HEADS * 2 * WIDTH * 2
#: One group a half; two, which the last section does not fill; some; and more than any context.
ARENAS = {"one group": 2, "two": 4, "seven": 14, "everything": 400}


@pytest.fixture(scope="module", params=[([300], [40]), ([3, 130, 61], [3, 17, 1]), ([96, 97, 98, 99], [96, 5, 98, 2])])
def batch(request) -> Batch:
    return Batch(*request.param)


@pytest.mark.parametrize("arena", ARENAS)
def test_sections_give_what_rows_in_place_give(batch, arena):
    result = batch.over_sections(ARENAS[arena] * GROUP_BYTES)
    # One bf16 step of values of this size; sums are float32 in both, in another order.
    torch.testing.assert_close(result.float(), batch.in_place().float(), atol=2**-8, rtol=2**-7)


def test_an_arena_that_no_group_divides():
    batch = Batch([200, 51], [30, 8], seed=3)
    expected = batch.in_place().float()
    for extra in (1, GROUP_BYTES - 1, GROUP_BYTES + 3):
        result = batch.over_sections(6 * GROUP_BYTES + extra)
        torch.testing.assert_close(result.float(), expected, atol=2**-8, rtol=2**-7)


def test_every_needed_row_crosses_once(batch, monkeypatch):
    from vllm.models.qwen4_exp.qsa.host_kv import arena as module

    copied: list[int] = []
    copy = module.copy_rows

    def counting(host, slots, size, begin, out):
        copied.extend(slots[begin : min(int(size), begin + len(out))].tolist())
        copy(host, slots, size, begin, out)

    monkeypatch.setattr(module, "copy_rows", counting)
    batch.over_sections(14 * GROUP_BYTES)
    needed = set()
    for selected, request in zip(batch.selected.tolist(), batch.token_to_req.tolist(), strict=True):
        for position in selected[: selected[-1]]:
            block = int(batch.block_table[request, position // BLOCK])
            needed.add((block * BLOCK + position % BLOCK) // RATIO)
    assert sorted(copied) == copied == sorted(needed)


def test_rows_shared_by_requests_cross_once():
    """Two requests with one prefix name the same blocks."""
    table = torch.tensor([[3, 5], [3, 9]], dtype=torch.int32)
    selected = torch.tensor([[0, 1, 33, 3], [1, 32, -1, 2]], dtype=torch.int32)
    union = union_of(selected, table, torch.tensor([0, 1]), BLOCK, 40 * BLOCK // RATIO, 10, RATIO)
    assert int(union.size) == 3
    assert union.groups[:3].tolist() == [3 * 8, 5 * 8, 9 * 8]
    assert union.numbers.tolist() == [[0, 1, 5], [1, 8, BEYOND]]


def test_a_token_that_selects_nothing_is_zero():
    batch = Batch([64], [8])
    batch.selected[3, -1] = 0
    result = batch.over_sections(6 * GROUP_BYTES)
    assert result[3].abs().max() == 0
    torch.testing.assert_close(result.float(), batch.in_place().float(), atol=2**-8, rtol=2**-7)


def test_nan_in_a_query_stays_in_its_row():
    """What is wrong must not be hidden: a guard looks for it."""
    batch = Batch([64], [8])
    batch.q[2, 1, 0] = torch.nan
    result = batch.over_sections(6 * GROUP_BYTES)
    assert result[2, 1].isnan().all()
    assert not result[[0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_parts_give_the_softmax_of_the_whole():
    """Against torch's own, with scores far enough apart that a wrong rescaling shows."""
    torch.manual_seed(1)
    q = torch.randn(5, HEADS, WIDTH) * 20
    keys, values = torch.randn(30, KV_HEADS, WIDTH), torch.randn(30, KV_HEADS, WIDTH)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(2),
        keys.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1).expand(5, -1, -1, -1),
        values.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1).expand(5, -1, -1, -1),
    ).squeeze(2)
    state = running.start(q)
    for begin, end in ((0, 7), (7, 7), (7, 29), (29, 30)):
        chosen = torch.full((5, 31), 10**6, dtype=torch.int32)
        chosen[:, : end - begin] = torch.arange(end - begin)
        chosen[:, -1] = end - begin
        running.fold(q, keys[begin:end], values[begin:end], chosen, state)
    gate = torch.full((5, HEADS, WIDTH), 1e9)
    torch.testing.assert_close(running.finish(state, gate, torch.empty_like(q)), expected)


def test_int8_rows_carry_their_scales():
    torch.manual_seed(2)
    q = torch.randn(3, HEADS, WIDTH)
    cache = torch.zeros(1, KV_HEADS, 8, INT8.content(WIDTH), dtype=torch.int8)
    keys, values, key_scales, value_scales = views(cache, INT8, WIDTH)
    keys.copy_(torch.randint(-127, 128, keys.shape))
    values.copy_(torch.randint(-127, 128, values.shape))
    key_scales.copy_(torch.rand(key_scales.shape) / 100)
    value_scales.copy_(torch.rand(value_scales.shape) / 100)
    chosen = torch.tensor([[0, 5, 7, 3], [1, -1, -1, 1], [2, 3, -1, 2]], dtype=torch.int32)
    coded, plain = running.start(q), running.start(q)
    running.fold(q, keys[0], values[0], chosen, coded, key_scales=key_scales[0], value_scales=value_scales[0])
    running.fold(q, keys[0] * key_scales[0].unsqueeze(-1), values[0] * value_scales[0].unsqueeze(-1), chosen, plain)
    for ours, theirs in zip(coded, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_sections_rows_are_ranges():
    numbers = torch.tensor([[0, 3, 4, 9], [4, 5, BEYOND, BEYOND]], dtype=torch.int32)
    out = torch.empty(2, 5, dtype=torch.int32)
    rows_of_section(numbers, 4, 4, out)
    assert out[:, -1].tolist() == [1, 2]
    assert out[0, 0] == 0 and out[1, :2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "contexts", "pool", "bound"),
    [
        (512, 262_144, 1_300_000, 11),  # one long prompt: the context
        (512, 4 * 262_144, 1_300_000, 43),  # four: a chunk of each could need 512 x 2048 rows
        (16, 262_144, 1_300_000, 2),  # few tokens: what they select
        (512, 4 * 262_144, 600_000, 25),  # shared prefixes: what there is
    ],
)
def test_the_bound_is_the_least_of_what_is_known(tokens, contexts, pool, bound):
    assert section_bound(tokens, 2051, contexts, pool, RATIO, 24_576 // RATIO) == bound
