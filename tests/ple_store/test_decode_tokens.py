"""Rows of decoding requests on a stage that gets its tokens from the last one, without asking the device."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.models.qwen4_exp.ple_store import received
from vllm.models.qwen4_exp.ple_store.decode_tokens import DecodeTokens
from vllm.models.qwen4_exp.ple_store.staging import PLERowStager

from .steps import DIM, EOS, PARTS, ROWS, batch_of, build_layer, look_up

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
    """Random requests that are stepped as a runner on the first of three stages steps them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.names: dict[int, str] = {}
        self.prompt: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.free_at: dict[int, int] = {}

    def start(self, index: int) -> None:
        self.names[index] = f"{index}-{self.dice.random()}"
        self.tokens[index] = [self.token() for _ in range(self.dice.randint(1, 12))]
        self.prompt[index] = len(self.tokens[index])
        self.computed[index] = 0
        self.free_at[index] = 0

    def token(self) -> int:
        # An end of text now and then: n-grams do not reach over it.
        return EOS if self.dice.random() < 0.1 else self.dice.randint(1, 63)

    def step(self, now: int) -> list[tuple[int, int]]:
        """(index, tokens) of those that take part: all of a prompt or a part of it, or the token sampled last."""
        parts = []
        for index, tokens in self.tokens.items():
            left = len(tokens) - self.computed[index]
            if left and self.free_at[index] <= now and self.dice.random() < 0.7:
                parts.append((index, self.dice.randint(1, left) if left > 1 else 1))
        return parts


def batch_for(requests: Requests, parts: list[tuple[int, int]]):
    pairs = []
    for index, count in parts:
        at = requests.computed[index]
        pairs.append((requests.tokens[index][:at], requests.tokens[index][at : at + count]))
    batch, states, inputs = batch_of(pairs)
    batch.req_ids = [requests.names[index] for index, _ in parts]
    states.req_id_to_index = dict.fromkeys(batch.req_ids, 0)
    batch.idx_mapping_np = np.array([index for index, _ in parts])
    batch.num_computed_tokens_np = np.array([requests.computed[index] for index, _ in parts])
    batch.query_start_loc_np = inputs["query_start_loc"].numpy()
    batch.num_draft_tokens = 0
    return pairs, batch, states, inputs


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_a_table_in_memory_and_decoding_asks_no_device(monkeypatch, write_table, handler, seed):
    written = write_table(rows=ROWS, dim=DIM, parts=PARTS)
    in_file, in_memory = build_layer(monkeypatch, written, True), build_layer(monkeypatch, written, False)
    stager = PLERowStager(torch.nn.ModuleList([in_file]))
    asked = []
    compute = in_file.compute_ngram_ids
    monkeypatch.setattr(in_file, "compute_ngram_ids", lambda *a, **k: asked.append(1) or compute(*a, **k))
    requests, decoded = Requests(seed), 0
    for index in range(4):
        requests.start(index)
    for now in range(120):
        handler.get_prev_sampled_outputs()
        parts = requests.step(now)
        if not parts:
            handler.receive(None)
            continue
        pairs, batch, states, inputs = batch_for(requests, parts)
        asked.clear()
        stager.stage(batch, states, inputs)
        rows = in_file(None, batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])
        assert torch.equal(rows, look_up(in_memory, pairs)), now
        if all(requests.computed[index] >= requests.prompt[index] for index, _ in parts):
            decoded += 1
            assert not asked
        sampled = [requests.token() for _ in parts]
        needed = []
        for (index, count), token in zip(parts, sampled):
            requests.computed[index] += count
            needed.append(requests.computed[index] == len(requests.tokens[index]))
            if needed[-1]:
                requests.tokens[index].append(token)
                requests.free_at[index] = now + STAGES
        handler.receive(
            SimpleNamespace(
                sampled_tokens=torch.tensor(sampled)[:, None],
                idx_mapping_np=np.array([index for index, _ in parts]),
                need_sampled_mask=np.array(needed),
            )
        )
        if now % 15 == 14:
            # One ends, and another takes its place while a token of the first is on its way.
            handler.req_idx_gen_np[now % 4] += 1
            requests.start(now % 4)
    assert decoded > 10


def test_a_token_too_many_or_of_someone_else_is_not_believed(handler):
    tokens = DecodeTokens(received.received_tokens())
    received.received_tokens().wanted = True
    made = SimpleNamespace(
        idx_mapping_np=np.array([0]),
        num_reqs=1,
        num_tokens=1,
        num_draft_tokens=0,
        req_ids=["a"],
        num_computed_tokens_np=np.array([4]),
        query_start_loc_np=np.array([0, 1]),
    )

    def arrive(token: int) -> None:
        handler.receive(
            SimpleNamespace(
                sampled_tokens=torch.tensor([[token]]), idx_mapping_np=np.array([0]), need_sampled_mask=np.array([True])
            )
        )
        for _ in range(STAGES):
            handler.get_prev_sampled_outputs()

    def step(**changes):
        arrive(9)
        tokens.note(made, torch.tensor([5]), torch.tensor([[3, 4]]))
        batch = SimpleNamespace(**(vars(made) | {"num_computed_tokens_np": np.array([5])} | changes))
        return tokens.known(batch)

    token, before = step()
    assert token.tolist() == [9] and before.tolist() == [[4, 5]]
    assert step(req_ids=["b"]) is None
    assert step(num_computed_tokens_np=np.array([6])) is None
    assert step(num_tokens=2) is None
    assert step(num_draft_tokens=1) is None
    assert step() is not None
    tokens.note(made, torch.tensor([5]), torch.tensor([[3, 4]]))
    assert tokens.known(SimpleNamespace(**(vars(made) | {"num_computed_tokens_np": np.array([5])}))) is None, (
        "none came"
    )


def test_the_last_stage_and_a_single_one_have_nothing_to_receive():
    received.watch(SimpleNamespace(is_last_rank=True))
    assert received.received_tokens() is None


def test_without_a_table_in_files_nothing_is_copied(handler):
    PLERowStager(torch.nn.Linear(2, 2))
    assert not received.received_tokens().wanted
