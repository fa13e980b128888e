"""The real server on three stages, through the `openai` client: streamed chat, completions, two users at once."""

from concurrent.futures import ThreadPoolExecutor

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
