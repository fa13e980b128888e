"""The real server on three stages, through the `openai` client: streamed chat, completions, two users at once."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
from safetensors import safe_open

from demo.client import MODEL, stream_chat
from demo.reference import greedy
from demo.run import ENGINE
from demo.server import Server, free_port
from vllm.ampere.command import main
from vllm.models.qwen4_exp.ple_store.flat.layout import FlatLocation, read_flat_header
from vllm.models.qwen4_exp.ple_store.ngram_ids import NgramHash

from . import constrained
from .compare import LARGEST, check_completion
from .damaged import DAMAGED_TOKEN, with_damaged_token
from .metrics import table_reads
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

READY_LIMIT = 400
ANSWER = 16
#: Chosen among a dozen sentences for answers that rounding does not decide; `test_questions_are_decisive` holds it.
QUESTIONS = ("How does a pipeline keep three stages busy?", "What does an expert do?")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    log, flat = folder / "serve.log", folder / "table.flat"
    assert main(["flatten-ple", str(checkpoint("ple-early")), str(flat)]) == 0
    with Server(
        with_damaged_token(checkpoint("ple-early"), folder / "checkpoint"),
        stages=3,
        port=free_port(),
        log=log,
        arguments=[
            *(*ENGINE, "--max-num-batched-tokens", "64", "--engram-config.host_file_path", str(flat)),
            *constrained.ARGUMENTS,
        ],
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ) as running:
        running.wait_until_healthy(READY_LIMIT, lambda seconds, milestone: None)
        running.reads_at_start = table_reads(running.url)
        running.table, running.header = flat, read_flat_header(flat)
        yield running


@pytest.fixture(scope="module")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def expect_answer(answer, model) -> None:
    expected = greedy(model, answer.prompt_tokens, ANSWER)
    assert answer.tokens == expected.tokens, f"margins {expected.margins}"
    assert max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)) <= LARGEST


def test_streamed_chat(server, references):
    answer = stream_chat(server.url, QUESTIONS[0], ANSWER)
    expect_answer(answer, references("ple-early"))
    assert len(answer.seconds) == ANSWER
    assert answer.seconds[0] < answer.seconds[-1], "all tokens came at once: nothing was streamed"


def test_reads_of_the_table_are_in_the_metrics(server):
    """Of the one stage that has it; and none before a request came, of all that start-up runs through the model."""
    assert list(server.reads_at_start) == ["0"] and not any(server.reads_at_start["0"].values())
    before = table_reads(server.url)["0"]
    answer = stream_chat(server.url, QUESTIONS[1], ANSWER)
    after = table_reads(server.url)["0"]
    heads = 16
    # All tokens but the last sampled one, unless a beginning of the prompt was cached.
    tokens = len(answer.prompt_tokens) + ANSWER - 1
    assert 0 < after["rows"] - before["rows"] <= heads * tokens
    assert 0 < after["unique_rows"] - before["unique_rows"] <= after["rows"] - before["rows"]
    assert after["steps"] - before["steps"] >= ANSWER
    assert after["row_wait_seconds"] > before["row_wait_seconds"] and after["failures"] == 0


def test_two_users_at_once(server, references):
    with ThreadPoolExecutor(2) as users:
        answers = list(users.map(lambda question: stream_chat(server.url, question, ANSWER), QUESTIONS))
    for answer in answers:
        expect_answer(answer, references("ple-early"))


def test_completion_with_logprobs(client, references):
    """Token ids as the prompt: past the indexer's budget, and cut into chunks of 64."""
    prompt, expected = decisive(references("ple-early"), 150, ANSWER, seed=31)
    done = check_completion(client, MODEL, prompt, expected, logprobs=2)
    assert done.usage.prompt_tokens == 150


def test_a_prompt_of_one_token(client, references):
    """Alone in its step, which is a prompt of one row for every layer; then beside a longer one."""
    model = references("ple-early")
    token = next(one for one in range(3, 200) if min(greedy(model, [one], 4).margins) > 0.5)
    expected = greedy(model, [token], 4)
    check_completion(client, MODEL, [token], expected, logprobs=2)
    prompt, long = decisive(model, 150, ANSWER, seed=31)
    with ThreadPoolExecutor(2) as users:
        beside = users.submit(check_completion, client, MODEL, prompt, long, logprobs=2)
        check_completion(client, MODEL, [token], expected, logprobs=2)
        beside.result()


def test_grammars_stay_with_their_requests(client, references):
    """A mask belongs to one request in one step: with several steps in flight, and users without any among them."""
    prompt, expected = decisive(references("ple-early"), 150, ANSWER, seed=31)
    alone = {name: constrained.ask(client, name) for name in constrained.GRAMMARS}
    for _ in range(2):
        beside = partial(check_completion, client, MODEL, prompt, expected, logprobs=2)
        assert constrained.all_at_once(client, beside) == alone


def test_questions_are_decisive(checkpoint, references):
    """Guards the tests above against a change of the weights that leaves their answers to rounding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("ple-early"))
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert min(greedy(references("ple-early"), prompt, ANSWER).margins) > 0.5


def refusals(client, *, messages=None, items=None, **fields) -> dict[tuple[str, bool], tuple[int, str]]:
    """(endpoint, streamed) -> code and message of the error that it answers these messages, or items, with."""
    from openai import APIError

    asks = {
        "chat": partial(client.chat.completions.create, messages=messages, max_tokens=4),
        "responses": partial(client.responses.create, input=items, max_output_tokens=4),
    }
    found = {}
    for (name, ask), streamed in product(asks.items(), (False, True)):
        with pytest.raises(APIError) as caught:
            list(ask(model=MODEL, stream=streamed, extra_body=fields))
        found[name, streamed] = caught.value.body["code"], caught.value.body["message"]
    return found


def tool_turn() -> dict[str, list[dict]]:
    """A call and its result, as either endpoint takes them."""
    question = {"role": "user", "content": QUESTIONS[0]}
    call = {"name": "f", "arguments": "{}"}
    said = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    return {
        "messages": [question, said, {"role": "tool", "tool_call_id": "c1", "content": "ok"}],
        "items": [
            question,
            {"type": "function_call", "call_id": "c1"} | call,
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ],
    }


def test_a_refused_turn_is_told_why_by_either_endpoint(server, client):
    """The engine refuses it, which for a stream is after its status line."""
    found = refusals(client, **tool_turn(), logit_bias={"1000000": 5})
    assert set(found) == {(name, streamed) for name in ("chat", "responses") for streamed in (False, True)}
    ((code, message),) = set(found.values())
    assert code == 400 and "token_id(s) [1000000] in logit_bias" in message


def test_a_malformed_tool_turn_is_told_what_it_lacks(server, client):
    turn = tool_turn()
    del turn["items"][1]["name"], turn["messages"][1]["tool_calls"][0]["function"]
    for (name, _), (code, message) in refusals(client, **turn).items():
        assert code == 400 and "Field required" in message
        assert message.startswith("1 validation error:") and (name == "chat" or "body.input.1.name" in message)


def damaged_requests(server) -> dict[str, int]:
    """What /metrics says: requests with damaged logits, and those that finished with an error."""
    with urlopen(f"{server.url}/metrics") as reply:
        text = reply.read().decode()
    patterns = {
        "damaged": r"^vllm:corrupted_requests_total\{[^}]*\} (\S+)",
        "errors": r'^vllm:request_success_total\{[^}]*finished_reason="error"[^}]*\} (\S+)',
    }
    return {name: int(float(re.search(pattern, text, re.M)[1])) for name, pattern in patterns.items()}


def test_a_damaged_request_ends_alone(server, client, references):
    """Three of them beside one that must not notice: damaged in its last token, in its first chunk, and in its answer."""
    from openai import APIError, InternalServerError

    prompt, expected = decisive(references("ple-early"), 150, ANSWER, seed=31)
    before = damaged_requests(server)
    assert before == {"damaged": 0, "errors": 0}

    def neighbour():
        return check_completion(client, MODEL, prompt, expected, logprobs=2)

    def ends_at_once(tokens):
        with pytest.raises(InternalServerError, match="not a number") as error:
            client.completions.create(model=MODEL, prompt=tokens, max_tokens=8)
        return error.value.status_code

    def ends_in_its_answer():
        """The damaged token is made the answer's first, and is the last that there is."""
        stream = client.completions.create(
            model=MODEL,
            prompt=prompt[:40],
            max_tokens=8,
            stream=True,
            logit_bias={str(DAMAGED_TOKEN): 100},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        tokens = []
        with pytest.raises(APIError, match="not a number"):
            for chunk in stream:
                tokens += chunk.choices[0].token_ids or []
        return tokens

    with ThreadPoolExecutor(4) as users:
        beside = users.submit(neighbour)
        # A prefix of the neighbour's prompt, whose blocks it would share; the second spans three chunks.
        status = [
            users.submit(ends_at_once, [*prompt[:30], DAMAGED_TOKEN]),
            users.submit(ends_at_once, [*prompt[:20], DAMAGED_TOKEN, *prompt]),
        ]
        answered = users.submit(ends_in_its_answer)
        assert [reply.result() for reply in status] == [500, 500]
        assert answered.result() == [DAMAGED_TOKEN]
        beside.result()
    # A response says so too.
    with pytest.raises(APIError, match="not a number") as error:
        list(
            client.responses.create(
                model=MODEL,
                input=QUESTIONS[0],
                max_output_tokens=8,
                stream=True,
                extra_body={"logit_bias": {str(DAMAGED_TOKEN): 100}, "ignore_eos": True},
            )
        )
    assert error.value.body["code"] == 500
    assert damaged_requests(server) == {"damaged": 4, "errors": 4}
    # Whatever the cache kept of these prompts is whole.
    neighbour()
    log = server.log.read_text(errors="replace")
    assert len(re.findall(r"Request \S+ ends: \d+ of its logits are NaN", log)) == 4


def test_a_lost_row_ends_the_requests_that_need_it(server, client, checkpoint, references):
    """The table's file is cut off while it is served; last, because it stays so."""
    from openai import APIError, InternalServerError

    kept = stream_chat(server.url, QUESTIONS[0], ANSWER)
    highest = last_row(server, checkpoint("ple-early"), kept.prompt_tokens + kept.tokens)
    prompts = (decisive(references("ple-early"), 150, 1, seed=seed)[0] for seed in range(50, 60))
    prompt = next(one for one in prompts if last_row(server, checkpoint("ple-early"), one) > highest)
    offset = last_row(server, checkpoint("ple-early"), prompt)
    os.truncate(server.table, offset + 3)
    # The file's name stands for its path: upstream keeps folders of the server from clients. The log has all of it.
    sentence = rf"Row \d+ of the n-gram table could not be read from {server.table.name} \(<path>\): expected 32 bytes "
    sentence += rf"at offset {offset}, found 3 bytes before the end of the file\. So the request was ended"
    with pytest.raises(InternalServerError, match=sentence) as error:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
    assert error.value.status_code == 500
    with pytest.raises(APIError, match=sentence):
        list(client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, stream=True))
    assert stream_chat(server.url, QUESTIONS[0], ANSWER).tokens == kept.tokens
    assert table_reads(server.url)["0"]["failures"] >= 1
    log = server.log.read_text(errors="replace")
    assert f"{server.table}: expected 32 bytes at offset {offset}" in log and "The server goes on" in log


def last_row(server: Server, checkpoint: Path, tokens: list[int]) -> int:
    """Offset in a flat file of the last row in it that these tokens need."""
    numbers = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith(("layer_multipliers", "sizes", "heads_offsets"))]
            numbers |= {name.rsplit(".", 1)[1]: file.get_tensor(name) for name in names}
    layer = SimpleNamespace(**numbers, heads_per_ngram=8, eos_token_id=0)
    ids = NgramHash.of(layer)(np.array(tokens), np.array([0, len(tokens)]), np.zeros((1, 2), dtype=np.int64))
    return int(FlatLocation(server.table, server.header).place(np.array([ids.max()]))[1][0])
