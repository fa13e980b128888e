"""Attention over sections is attention over rows in place, whatever the arena, and reads every needed row once."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from vllm.forward_context import override_forward_context
from vllm.models.qwen4_exp.compact_kv.impl import PagedQSA
from vllm.models.qwen4_exp.qsa.formats import BF16, INT8, KVFormat, views
from vllm.models.qwen4_exp.qsa.host_kv.arena import Arena
from vllm.models.qwen4_exp.qsa.host_kv.contexts import with_contexts
from vllm.models.qwen4_exp.qsa.host_kv.impl import HostKVImpl
from vllm.models.qwen4_exp.qsa.host_kv.layer import rows_view
from vllm.models.qwen4_exp.qsa.host_kv.prompt import prompt_attention, section_bound
from vllm.models.qwen4_exp.qsa.host_kv.spec import HostRows
from vllm.models.qwen4_exp.qsa.host_kv.union import BEYOND, edges_of_sections, union_of
from vllm.models.qwen4_exp.qsa.host_kv.union_reference import block_order
from vllm.models.qwen4_exp.qsa.reference import sparse_paged_attention

from .planning import rows

CPU = torch.device("cpu")
RATIO, BLOCK, HEADS, KV_HEADS, WIDTH = 4, 32, 4, 2, 64
BUDGET = 24


class Batch:
    """Requests in the middle of a prompt: blocks in random order, selections as the indexer packs them.

    What is in rows and which are selected depends on ``seed``, where rows lie on ``places`` too. Rows that no request has written, and everything selections leave unused, hold NaN or a number that no index may be.
    """

    def __init__(
        self,
        contexts: list[int],
        chunks: list[int],
        seed: int = 0,
        blocks: int = 40,
        form: KVFormat = BF16,
        places: int = 0,
    ) -> None:
        source = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        spec = rows(BLOCK, KV_HEADS, WIDTH, form)
        host = HostRows(spec, 0)
        self.form, self.group_bytes = form, RATIO * host.row_bytes
        # What pads rows of int8 is NaN to whoever takes it for scales.
        memory = torch.full((blocks * BLOCK * host.row_bytes,), 0xFF, dtype=torch.uint8)
        self.kv_cache = rows_view(memory, host, blocks)
        self.cache = views(self.kv_cache, form, WIDTH)
        # Of int8 rows the scales are what can be NaN.
        for part in self.cache[:2] if form is BF16 else self.cache[2:]:
            part.fill_(torch.nan)
        numbers = random.Random(f"{seed} {places}").sample(range(1, blocks), sum(-(-n // BLOCK) for n in contexts))
        longest = max(-(-n // BLOCK) for n in contexts)
        self.block_table = torch.full((len(contexts), longest), 10**6, dtype=torch.int32)
        selected, owners = [], []
        for request, (context, chunk) in enumerate(zip(contexts, chunks, strict=True)):
            mine, numbers = numbers[: -(-context // BLOCK)], numbers[-(-context // BLOCK) :]
            self.block_table[request, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            for position in range(context):
                at = mine[position // BLOCK], position % BLOCK
                for stored, scale in (self.cache[::2], self.cache[1::2]):
                    row = torch.randn(KV_HEADS, WIDTH, generator=generator)
                    if form is INT8:
                        scale[at] = row.abs().amax(-1) / 127
                        row = (row / scale[at].unsqueeze(-1)).round()
                    stored[at] = row.to(form.dtype)
            for position in range(context - chunk, context):
                whole = (position + 1) // RATIO
                groups = sorted(source.sample(range(whole), min(whole, BUDGET // RATIO)))
                tokens = [group * RATIO + r for group in groups for r in range(RATIO)]
                tokens += range(whole * RATIO, position + 1)
                selected.append(tokens + [-1] * (BUDGET + RATIO - 1 - len(tokens)) + [len(tokens)])
                owners.append(request)
        self.lengths, self.contexts = contexts, sum(contexts)
        self.selected = torch.tensor(selected, dtype=torch.int32)
        self.token_to_req = torch.tensor(owners, dtype=torch.int32)
        self.q = torch.randn(len(owners), HEADS, WIDTH, generator=generator).bfloat16()
        self.gate = torch.randn(len(owners), HEADS * WIDTH, generator=generator).bfloat16()

    def in_place(self, attend=sparse_paged_attention, **how) -> torch.Tensor:
        """Every token reads its rows itself."""
        return attend(
            self.q, self.cache.keys, self.cache.values, self.selected, self.block_table, self.token_to_req,
            torch.empty_like(self.q), output_gate=self.gate, key_scales=self.cache.key_scales,
            value_scales=self.cache.value_scales, **how,
        )  # fmt: skip

    def over_sections(self, arena_bytes: int) -> torch.Tensor:
        return prompt_attention(
            self.q, self.kv_cache, self.form, self.selected, self.block_table, self.token_to_req, RATIO, self.contexts,
            Arena(arena_bytes, CPU), torch.full_like(self.q, torch.nan), output_gate=self.gate,
        )  # fmt: skip


GROUP_BYTES = RATIO * KV_HEADS * 2 * WIDTH * 2
#: One group a half; two, which the last section does not fill; some; and more than any context.
ARENAS = {"one group": 2, "two": 4, "seven": 14, "everything": 400}


CASES = [
    ([300], [40], BF16), ([3, 130, 61], [3, 17, 1], BF16), ([96, 97, 98, 99], [96, 5, 98, 2], BF16),
    ([3, 130, 61], [3, 17, 1], INT8),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[2].name} {case[0]}")
def batch(request) -> Batch:
    contexts, chunks, form = request.param
    return Batch(contexts, chunks, form=form)


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


def use_kernels(monkeypatch) -> list[torch.Tensor]:
    """Number rows and attend to sections by the kernels; columns of every section are added to what is returned."""
    from vllm.models.qwen4_exp.qsa import sections
    from vllm.models.qwen4_exp.qsa.host_kv import numbering, prompt

    seen = []

    def attend(state, q, rows, numbers, columns, table, zeros, k_scale):
        seen.append(columns.clone())
        scales = {"key_scales": rows.key_scales, "value_scales": rows.value_scales, "k_scale": k_scale}
        sections.attend_section(state, q, rows.keys, rows.values, numbers, columns, table, zeros, **scales)

    def finish(state, out, output_gate, v_scale):
        return sections.finish(state, out, output_gate=output_gate, v_scale=v_scale)

    monkeypatch.setattr(prompt, "attend", attend)
    monkeypatch.setattr(prompt, "finish", finish)
    monkeypatch.setattr(prompt, "union_of", numbering.union_of)
    monkeypatch.setattr(prompt, "edges_of_sections", numbering.edges_of_sections)
    return seen


def test_the_kernels_take_sections_as_the_reference_does(monkeypatch):
    """What a GPU runs, interpreted: a union as one request, its sections as blocks, the arena's halves by turns."""
    batch = Batch([70, 9], [6, 2], seed=5)
    expected = batch.over_sections(6 * GROUP_BYTES)
    seen = use_kernels(monkeypatch)
    result = batch.over_sections(6 * GROUP_BYTES)
    assert len(seen) > 2
    torch.testing.assert_close(result.float(), expected.float(), atol=2**-7, rtol=2**-6)


class Layer:
    """A sparse layer and its implementation over rows in host memory, as a step of some rows of a batch calls it."""

    def __init__(self, batch: Batch, attend, arena_bytes: int) -> None:
        inner = PagedQSA()
        inner.head_size, inner.form, inner.attend = WIDTH, batch.form, attend
        inner.warm_up = lambda *args, **keywords: "warm"
        self.batch, self.impl = batch, HostKVImpl(inner, batch.form, RATIO, arena_bytes)
        self.indexer = SimpleNamespace(raw_key_cache=SimpleNamespace(prefix="side"))

    def step(self, rows: list[int], decodes: int, padding: int = 3) -> torch.Tensor:
        """``[rows, heads, width]``, of which the first ``decodes`` are requests with one token."""
        batch = self.batch
        pad = (0, 0, 0, 0, 0, padding)
        q, gate = (torch.nn.functional.pad(x[rows].view(len(rows), HEADS, WIDTH), pad) for x in (batch.q, batch.gate))
        self.topk_indices_buffer = batch.selected[rows]
        metadata = SimpleNamespace(num_actual_tokens=len(rows), block_table=batch.block_table)
        prompts = {int(request) for request in batch.token_to_req[rows[decodes:]]}
        side = SimpleNamespace(
            num_decode_tokens=decodes, prompt_contexts=sum(batch.lengths[request] for request in prompts)
        )
        output = torch.full_like(q, torch.nan)
        owners = batch.token_to_req[rows]
        with override_forward_context(SimpleNamespace(attn_metadata={"side": side})):
            self.impl.forward_qsa(
                self, q, None, None, batch.kv_cache, metadata, output, owners, decodes < len(rows), gate
            )
        assert output[len(rows) :].abs().max() == 0
        return output[: len(rows)]


def test_prompts_go_over_sections_and_single_tokens_do_not(monkeypatch):
    """Single tokens read rows where they are, which a captured graph can; longer parts go through the arena."""
    from vllm.models.qwen4_exp.qsa.host_kv import impl

    in_place, over_sections = [], []

    def attend(q, *args, **keywords):
        in_place.append((len(q), keywords["prefill"]))
        return sparse_paged_attention(q, *args, **keywords)

    def sections(q, *args, **keywords):
        over_sections.append((len(q), args[6]))
        return prompt_attention(q, *args, **keywords)

    monkeypatch.setattr(impl, "prompt_attention", sections)
    batch = Batch([40, 51, 64], [1, 1, 8])
    layer = Layer(batch, attend, 8 * GROUP_BYTES)
    mixed = layer.step(list(range(10)), decodes=2)
    torch.testing.assert_close(mixed.float(), batch.in_place().float(), atol=2**-8, rtol=2**-7)
    # Of contexts only the prompt's, 64 tokens, is for sections to hold.
    assert (in_place, over_sections) == ([(2, False)], [(8, 64)])
    layer.step([0, 1], decodes=2)
    assert (in_place, over_sections) == ([(2, False)] * 2, [(8, 64)])
    layer.step(list(range(2, 10)), decodes=0)
    assert (in_place, over_sections) == ([(2, False)] * 2, [(8, 64)] * 2)
    shape = {"num_query_heads": HEADS, "selection_width": batch.selected.shape[1] - 1}
    assert layer.impl.warm_up(batch.kv_cache, batch.block_table, **shape) == "warm"


@pytest.fixture
def interpreted(monkeypatch):
    """Numbers and sections by the kernels, as on a GPU; gives the attention kernel for rows in place."""
    from vllm.models.qwen4_exp.qsa import attention

    use_kernels(monkeypatch)
    return attention.sparse_paged_attention


@pytest.mark.parametrize("form", [BF16, INT8], ids=lambda form: form.name)
def test_a_decoding_request_has_the_same_bits_whoever_else_is_in_the_step(interpreted, form):
    """Alone, beside another, beside prompts of any length, and at any number of padding rows."""
    batch = Batch([60, 37, 21], [1, 1, 2], seed=8, form=form)
    layer = Layer(batch, interpreted, 8 * GROUP_BYTES)
    alone = layer.step([0], decodes=1)
    for some, decodes, padding in (([0, 1], 2, 1), ([0, 2, 3], 1, 3), ([1, 0, 2, 3], 2, 5)):
        found = layer.step(some, decodes, padding)[some.index(0)]
        assert torch.equal(found, alone[0]), f"beside rows {some}"


@pytest.mark.parametrize("form", [BF16, INT8], ids=lambda form: form.name)
def test_a_row_within_one_section_has_the_bits_of_rows_in_place(interpreted, form):
    """All in one section; and a section that ends behind the first request's rows, with the other's in the next."""
    batch = Batch([44, 120], [2, 2], seed=3, form=form)
    expected = batch.in_place(interpreted, prefill=True)
    assert torch.equal(expected, batch.in_place(interpreted, prefill=False))
    assert torch.equal(batch.over_sections(2 * 60 * batch.group_bytes), expected)
    first = {position // RATIO for row in batch.selected[:2].tolist() for position in row[: row[-1]]}
    found = batch.over_sections(2 * len(first) * batch.group_bytes)
    assert torch.equal(found[:2], expected[:2])
    torch.testing.assert_close(found[2:], expected[2:], rtol=2**-7, atol=1e-5)


def test_where_the_pool_has_rows_changes_no_bit(interpreted):
    """The same request after another history of the pool, over several sections."""
    one, other = (Batch([120], [2], seed=4, form=INT8, places=places) for places in (0, 1))
    assert not torch.equal(one.block_table, other.block_table)
    arena = 6 * one.group_bytes
    assert torch.equal(one.over_sections(arena), other.over_sections(arena))


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
    assert sorted(copied) == sorted(needed)


def test_rows_shared_by_requests_cross_once():
    """Two requests with one prefix name the same blocks."""
    table = torch.tensor([[7, 5], [7, 3]], dtype=torch.int32)
    selected = torch.tensor([[0, 1, 33, 3], [1, 32, -1, 2]], dtype=torch.int32)
    union = union_of(selected, table, torch.tensor([0, 1]), BLOCK, 40 * BLOCK // RATIO, 10, RATIO)
    assert int(union.size) == 3
    assert union.groups[:3].tolist() == [7 * 8, 5 * 8, 3 * 8]
    assert union.numbers.tolist() == [[0, 1, 5, 3], [1, 8, BEYOND, 2]]


def test_blocks_of_every_request_ascend_though_they_share_some():
    """Prefixes of three lengths, and entries beyond a request's tokens that name others' blocks, or none."""
    table = torch.tensor([[8, 2, 4, 99], [8, 7, 1, 5], [8, 7, 0, 4], [3, 8, 2, 7]], dtype=torch.int32)
    last = torch.tensor([2, 3, 2, 0])
    selected = torch.stack([last * BLOCK + 5, torch.full((4,), 1)], 1).int()
    order = block_order(selected, table, torch.arange(4), BLOCK, 10).tolist()
    assert order[:8] == [8, 2, 4, 7, 1, 5, 0, 3]
    assert sorted(order) == list(range(10))
    selected[:, -1] = 0
    assert sorted(block_order(selected, table, torch.arange(4), BLOCK, 10).tolist()) == list(range(10))


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


def test_a_sections_columns_are_ranges():
    numbers = torch.tensor([[0, 3, 4, 9, 4], [4, 5, BEYOND, BEYOND, 2]], dtype=torch.int32)
    first, second = edges_of_sections(numbers, 4, 4).unbind(1)
    assert first.tolist() == [[0, 2], [2, 3], [3, 4], [4, 4]]
    assert second.tolist() == [[0, 0], [0, 2], [2, 2], [2, 2]]


@pytest.mark.parametrize("missing", [1, 9])
def test_contexts_that_are_too_short_are_no_secret(missing):
    """A GPU would lose groups without a word, so a CPU, which asks how many there are, does not."""
    batch = Batch([200], [30])
    rows = batch.selected.tolist()
    groups = {position // RATIO for row in rows for position in row[: row[-1]]}
    batch.contexts = (len(groups) - missing - len(rows)) * RATIO
    with pytest.raises((AssertionError, RuntimeError), match="sections are needed|out of bounds"):
        batch.over_sections(2 * GROUP_BYTES)
    batch.contexts += missing * RATIO
    batch.over_sections(2 * GROUP_BYTES)


@pytest.mark.parametrize(
    ("decodes", "prompts", "contexts"),
    [(0, 2, 130), (2, 1, 7), (1, 0, 0)],  # requests without a token are padding
)
def test_contexts_are_those_of_prompts(decodes, prompts, contexts):
    step = SimpleNamespace(num_decodes=decodes, num_prefills=prompts, max_seq_len=100)
    lengths = torch.tensor([100, 30, 7, 0], dtype=torch.int32)
    assert with_contexts(step, SimpleNamespace(seq_lens_cpu_upper_bound=lengths)) is step
    assert step.prompt_contexts == contexts
    # Who does not know them has the longest for each.
    with_contexts(step, SimpleNamespace(seq_lens_cpu_upper_bound=None))
    assert step.prompt_contexts == 100 * prompts


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
