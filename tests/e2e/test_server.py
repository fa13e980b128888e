"""The real server on three stages, through the `openai` client: streamed chat, completions, two users at once."""

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest

from demo.client import MODEL, stream_chat
from demo.reference import greedy
from demo.run import ENGINE
from demo.server import Server, free_port

from .compare import LARGEST, check_completion
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

READY_LIMIT = 400
ANSWER = 16
#: Chosen among a dozen sentences for answers that rounding does not decide; `test_questions_are_decisive` holds it.
QUESTIONS = ("How does a pipeline keep three stages busy?", "What does an expert do?")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "serve.log"
    with Server(
        checkpoint("ple-early"),
        stages=3,
        port=free_port(),
        log=log,
        arguments=[*ENGINE, "--max-num-batched-tokens", "64"],
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ) as running:
        running.wait_until_healthy(READY_LIMIT, lambda seconds, milestone: None)
        running.reads_at_start = table_reads(running.url)
        yield running


def table_reads(url: str) -> dict[str, dict[str, float]]:
    """Counters of the n-gram table's reads by the stage that reads, as `/metrics` has them."""
    with urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if match := re.match(r'vllm:ngram_table_(\w+)_total\{.*stage="(\d+)".*\} (\S+)$', line):
            found.setdefault(match[2], {})[match[1]] = float(match[3])
    return found


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


def test_questions_are_decisive(checkpoint, references):
    """Guards the tests above against a change of the weights that leaves their answers to rounding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("ple-early"))
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert min(greedy(references("ple-early"), prompt, ANSWER).margins) > 0.5
