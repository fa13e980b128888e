"""Rows of random steps against a table in memory: prompts in any chunks, decoding, drafts, preemption, aborts, and
tokens that come from the last stage; and which of these wait for the device."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.models.qwen4_exp.ple_store import received, staging
from vllm.models.qwen4_exp.ple_store.host_tokens import HostTokens
from vllm.models.qwen4_exp.ple_store.ngram_ids import NgramHash
from vllm.models.qwen4_exp.ple_store.staging import PLERowStager

from .steps import DIM, EOS, MAX_TOKENS, PARTS, ROWS, STEPS, batch_of, build_layer, look_up

STAGES = 3


class Handler:
    """As upstream's: the tokens of a step are consumed `STAGES` steps later, in order."""

    is_last_rank = False
    broadcast_stream = None

    def __init__(self) -> None:
        self.queue = deque([None] * STAGES)
        self.req_idx_gen_np = np.zeros(8, dtype=np.int32)

    def receive(self, slot) -> bool:
        if slot is not None:
            slot.gen_at_receive_np = self.req_idx_gen_np[slot.idx_mapping_np]
        self.queue[-1] = slot
        return True

    def get_prev_sampled_outputs(self):
        slot = self.queue.popleft()
        self.queue.append(None)
        return None if slot is None else {}


@pytest.fixture
def handler():
    made = Handler()
    received.watch(made)
    yield made
    received._handlers.clear()


class Requests:
    """Random requests, stepped as a runner steps them.

    Args:
        add: told of a request that takes a place
        delay: steps until a sampled token is there
    """

    def __init__(self, seed: int, add, delay: int) -> None:
        self.dice, self.add, self.delay = random.Random(seed), add, delay
        self.tokens: dict[int, list[int]] = {}
        self.names: dict[int, str] = {}
        self.prefill: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.free_at: dict[int, int] = {}

    def start(self, index: int) -> None:
        self.names[index] = f"{index}-{self.dice.random()}"
        self.tokens[index] = [self.token() for _ in range(self.dice.randint(1, 12))]
        self.enter(index)

    def enter(self, index: int) -> None:
        """New, or back after preemption: all tokens so far are computed again, but for a cached beginning."""
        self.prefill[index] = len(self.tokens[index])
        self.computed[index] = self.dice.choice([0, self.dice.randint(0, self.prefill[index] - 1)])
        self.free_at[index] = 0
        self.add(index, self.names[index], list(self.tokens[index]))

    def token(self) -> int:
        # An end of text now and then: n-grams do not reach over it.
        return EOS if self.dice.random() < 0.1 else self.dice.randint(1, 63)

    def step(self, now: int) -> list[tuple[int, int]]:
        """(index, tokens) of those that take part: all of a prompt or a part of it, or the token sampled last."""
        parts, room = [], MAX_TOKENS - 8
        for index, tokens in self.tokens.items():
            left = min(len(tokens) - self.computed[index], room)
            if left and self.free_at[index] <= now and self.dice.random() < 0.7:
                parts.append((index, self.dice.randint(1, left) if left > 1 else 1))
                room -= parts[-1][1]
        return parts

    def decodes(self, parts) -> bool:
        return all(self.computed[index] >= self.prefill[index] for index, _ in parts)

    def prefills(self, parts) -> bool:
        return all(self.computed[index] < self.prefill[index] for index, _ in parts)

    def advance(self, parts, now: int) -> tuple[list[int], list[bool]]:
        """Tokens sampled for each, and whether they count."""
        sampled, needed = [self.token() for _ in parts], []
        for (index, count), token in zip(parts, sampled):
            self.computed[index] += count
            needed.append(self.computed[index] == len(self.tokens[index]))
            if needed[-1]:
                self.tokens[index].append(token)
                self.free_at[index] = now + self.delay
        return sampled, needed


def batch_for(requests: Requests, parts, drafts: dict[int, list[int]] | None = None):
    pairs = []
    for index, count in parts:
        at = requests.computed[index]
        now = requests.tokens[index][at : at + count] + (drafts or {}).get(index, [])
        pairs.append((requests.tokens[index][:at], now))
    batch, states, inputs = batch_of(pairs, padded=MAX_TOKENS if requests.dice.random() < 0.3 else None)
    batch.req_ids = [requests.names[index] for index, _ in parts]
    states.req_id_to_index = dict.fromkeys(batch.req_ids, 0)
    batch.idx_mapping_np = np.array([index for index, _ in parts])
    batch.num_draft_tokens = sum(map(len, (drafts or {}).values()))
    return pairs, batch, states, inputs


@pytest.fixture
def layers(monkeypatch, write_table):
    written = write_table(rows=ROWS, dim=DIM, parts=PARTS)
    return build_layer(monkeypatch, written, True), build_layer(monkeypatch, written, False)


class Runner:
    """A stager over a layer in files, and the same layer in memory beside it."""

    def __init__(self, in_file, in_memory) -> None:
        self.in_file, self.in_memory = in_file, in_memory
        self.state = SimpleNamespace(add_request=lambda index, request: None, vllm_config=None)
        self.stager = PLERowStager(torch.nn.ModuleList([in_file]), self.state)
        self.asked = False
        step = self.stager._tokens.step

        def note(*arguments):
            made = step(*arguments)
            self.asked = made.asked
            return made

        self.stager._tokens.step = note

    def add(self, index, name, tokens) -> None:
        self.state.add_request(index, SimpleNamespace(req_id=name, prefill_token_ids=tokens))

    def check(self, pairs, batch, states, inputs, say="") -> None:
        self.in_file.ngram_embedding.rows.fill_(torch.nan)
        self.stager.stage(batch, states, inputs)
        rows = self.in_file(None, batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])
        total = batch.num_tokens
        assert torch.equal(rows[:total], look_up(self.in_memory, pairs)), say
        assert not rows[total:].any()


@pytest.mark.parametrize("seed", range(4))
def test_first_stage_of_three(layers, handler, seed):
    """Neither prompts nor decoding ask the device; requests end, are preempted and replaced on the way."""
    runner = Runner(*layers)
    requests, counts = Requests(seed, runner.add, STAGES), dict.fromkeys(("decodes", "prefills"), 0)
    for index in range(4):
        requests.start(index)
    for now in range(150):
        handler.get_prev_sampled_outputs()
        parts = requests.step(now)
        if not parts:
            handler.receive(None)
            continue
        runner.check(*batch_for(requests, parts), now)
        assert not runner.asked, now
        counts["decodes"] += requests.decodes(parts)
        counts["prefills"] += requests.prefills(parts)
        sampled, needed = requests.advance(parts, now)
        handler.receive(
            SimpleNamespace(
                sampled_tokens=torch.tensor(sampled)[:, None],
                idx_mapping_np=np.array([index for index, _ in parts]),
                need_sampled_mask=np.array(needed),
            )
        )
        if now % 10 == 9:
            # One gives up its place while a token of it is on its way, for another or for itself.
            index = requests.dice.randrange(4)
            handler.req_idx_gen_np[index] += 1
            requests.start(index) if requests.dice.random() < 0.5 else requests.enter(index)
    assert counts["decodes"] > 10 and counts["prefills"] > 0
    # Rows that were read ahead are those of chunks, and some of them were used.
    assert runner.in_file.ngram_embedding.counters.ahead_rows > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_single_stage_with_drafts(layers, seed):
    """Chunks of prompts alone do not ask the device; decoding does, with drafts of which some are refused."""
    runner = Runner(*layers)
    requests, alone = Requests(seed, runner.add, 1), 0
    for index in range(4):
        requests.start(index)
    for now in range(150):
        parts = requests.step(now)
        if not parts:
            continue
        drafts = {
            index: [requests.token() for _ in range(requests.dice.randint(1, 2))]
            for index, count in parts
            if requests.computed[index] >= requests.prefill[index] and requests.dice.random() < 0.5
        }
        made = batch_for(requests, parts, drafts)
        if requests.prefills(parts):
            alone += 1
        runner.check(*made, now)
        assert runner.asked is not requests.prefills(parts), now
        for index, drafted in drafts.items():
            # A beginning of the drafts is accepted.
            taken = drafted[: requests.dice.randint(0, len(drafted))]
            requests.tokens[index] += taken
            requests.computed[index] += len(taken)
        requests.advance(parts, now)
        if now % 10 == 9:
            index = requests.dice.randrange(4)
            requests.start(index) if requests.dice.random() < 0.5 else requests.enter(index)
    assert alone > 0


def test_a_single_stage_that_decodes_asks_for_tokens_alone(layers, monkeypatch):
    """Without drafts the tokens before are known on the host, also across preemption and another request's start."""
    runner = Runner(*layers)
    monkeypatch.setattr(staging._OnDevice, "before", lambda self: pytest.fail("asked for tokens before"))
    requests, decoded = Requests(0, runner.add, 1), 0
    for index in range(4):
        requests.start(index)
    for now in range(100):
        parts = requests.step(now)
        if parts:
            runner.check(*batch_for(requests, parts), now)
            decoded += runner.asked
            requests.advance(parts, now)
        if now % 10 == 9:
            index = requests.dice.randrange(4)
            requests.start(index) if requests.dice.random() < 0.5 else requests.enter(index)
    assert decoded > 10


def test_drafts_dropped_on_the_device(layers):
    """The host had cut the batch for more tokens than there are: where requests begin is the device's to say."""
    runner = Runner(*layers)
    pairs = [([3, 4, 5], [6, 7]), ([8], [9]), ([], [1, 2, 3])]
    batch, states, inputs = batch_of(pairs)
    for row, (before, now) in enumerate(pairs):
        runner.add(row, batch.req_ids[row], before + now)
    batch.query_start_loc_np = np.array([0, 4, 5, 8])
    batch.num_draft_tokens = 3
    runner.check(pairs, batch, states, inputs)
    assert runner.asked


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_the_hash_is_upstreams(layers, requests):
    layer = layers[0]
    batch, _, inputs = batch_of(requests)
    wanted = layer.compute_ngram_ids(
        batch.input_ids, inputs["query_start_loc"][: batch.num_reqs + 1], inputs["ngram_context"]
    )
    before = inputs["ngram_context"][: batch.num_reqs].numpy()
    got = NgramHash.of(layer)(batch.input_ids.numpy(), batch.query_start_loc_np, before)
    assert np.array_equal(got, wanted.numpy())


def test_the_hash_with_the_published_numbers(layers):
    """Multipliers up to 2^63 / vocabulary, primes of twenty million, and n-grams of two to four."""
    upstream = type(layers[0])
    for size in (2, 3, 4):
        multipliers = upstream._make_layer_multipliers(
            ngram_size=size, unigram_vocab_size=248320, seed=1234, ple_dense_layer_id=0
        )
        sizes = [20_000_003 + 2 * n for n in range(8 * (size - 1))]
        layer = SimpleNamespace(
            layer_multipliers=torch.tensor(multipliers),
            ngram_heads_vocab_sizes=torch.tensor(sizes),
            ngram_heads_offsets=torch.tensor(np.cumsum([0, *sizes[:-1]])),
            heads_per_ngram=8,
            eos_token_id=5,
            ngram_size=size,
            _shift_precompute=upstream._shift_precompute,
            _shift_apply=upstream._shift_apply,
        )
        dice = np.random.default_rng(size)
        tokens = dice.integers(0, 248320, 40)
        tokens[dice.integers(0, 40, 6)] = 5
        # Also one token each, and as many tokens as requests of which one has none.
        for starts in ([0, 1, 2, 17, 40], range(41), [*range(39), 40, 40]):
            before = dice.integers(0, 248320, (len(starts) - 1, size - 1))
            before[1], before[2, -1] = 5, 5
            given = tokens, np.array(starts), before
            wanted = upstream.compute_ngram_ids(layer, *map(torch.tensor, given))
            assert np.array_equal(NgramHash.of(layer)(*given), wanted.numpy()), size


def one(computed=5, **changes):
    made = {
        "idx_mapping_np": np.array([0]),
        "num_reqs": 1,
        "num_tokens": 1,
        "num_draft_tokens": 0,
        "req_ids": ["a"],
        "num_computed_tokens_np": np.array([computed]),
        "query_start_loc_np": np.array([0, 1]),
    }
    return SimpleNamespace(**(made | changes))


def test_a_token_too_many_or_of_someone_else_is_not_believed(handler):
    tokens = HostTokens(2, EOS, received.received_tokens())
    received.received_tokens().wanted = True

    class Device:
        tokens, starts = staticmethod(lambda: np.array([40])), staticmethod(lambda: np.array([0, 1]))
        before = staticmethod(lambda: np.array([[41, 42]]))

    def arrive(*drawn: int) -> None:
        handler.receive(
            SimpleNamespace(
                sampled_tokens=torch.tensor([drawn]), idx_mapping_np=np.array([0]), need_sampled_mask=np.array([True])
            )
        )
        for _ in range(STAGES):
            handler.get_prev_sampled_outputs()

    def step(*drawn, **changes):
        tokens.add(0, "a", [1, 2, 3, 4, 5])
        assert not tokens.step(one(computed=4), Device).asked
        arrive(*drawn or (9,))
        return tokens.step(one(**changes), Device)

    made = step()
    assert (made.tokens.tolist(), made.before.tolist(), made.asked) == ([9], [[4, 5]], False)
    assert step(req_ids=["b"]).tokens.tolist() == [40]
    assert step(computed=6).asked
    assert step(9, 10).asked, "several came, some of which were refused"
    assert not step().asked
    assert tokens.step(one(computed=6), Device).asked, "none came"


def test_what_follows_a_chunk():
    tokens = HostTokens(2, EOS)
    tokens.add(0, "a", list(range(10, 20)))
    tokens.add(1, "b", [30, 31])
    tokens.add(2, "c", list(range(40, 60)))
    batch = SimpleNamespace(
        idx_mapping_np=np.array([0, 1, 2]),
        num_reqs=3,
        req_ids=["a", "b", "c"],
        num_computed_tokens_np=np.array([0, 0, 1]),
        query_start_loc_np=np.array([0, 4, 6, 14]),
    )
    made = tokens.following(batch, 100)
    assert made.tokens.tolist() == [14, 15, 16, 17, *range(49, 57)]
    assert made.starts.tolist() == [0, 4, 12] and made.before.tolist() == [[12, 13], [47, 48]]
    assert tokens.following(batch, 6).tokens.tolist() == [14, 15, 16, 17, 49, 50]
    batch.req_ids = ["x", "b", "y"]
    assert tokens.following(batch, 100) is None


def test_the_last_stage_and_a_single_one_have_nothing_to_receive():
    received.watch(SimpleNamespace(is_last_rank=True))
    assert received.received_tokens() is None


def test_without_a_table_in_files_nothing_is_copied(handler):
    PLERowStager(torch.nn.Linear(2, 2))
    assert not received.received_tokens().wanted
