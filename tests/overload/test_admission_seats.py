"""Requests are refused before their response begins: AsyncLLM's own code over an engine that takes everything."""

import asyncio
import gc
from types import SimpleNamespace

import pytest

from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.admission_seats import SeatedLLM, Seats, let_in
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor


class Processor:
    """Makes requests of token ids; a prompt that begins with 0 is invalid."""

    assign_request_id = staticmethod(InputProcessor.assign_request_id)

    def process_inputs(self, request_id, prompt, params, **_):
        if prompt["prompt_token_ids"][0] == 0:
            raise VLLMValidationError("no such token")
        return EngineCoreRequest(request_id, prompt["prompt_token_ids"], None, params, None, 0.0, None, None, None)


class Engine(SeatedLLM):
    """The client without its process: whatever is sent is taken, and no answer ever comes."""

    def __init__(self, reqs: int | None = None, tokens: int | None = None):
        self.seats = Seats()
        self.sent: list[str] = []
        self.scheduler_config = SimpleNamespace(max_num_queued_reqs=reqs, max_num_queued_tokens=tokens)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.input_processor = Processor()
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_dead=False), add_request_async=self._take, abort_requests_async=self._take
        )
        self.admission_stats = self.logger_manager = self.output_handler = self.renderer = None
        self.log_requests = False

    async def _take(self, request):
        self.sent.append(request)
        await asyncio.sleep(0)

    async def get_supported_tasks(self):
        await asyncio.sleep(0)
        return ("generate",)

    def _run_output_handler(self):
        pass

    def shutdown(self, timeout=None):
        pass

    def ask(self, name: str, length: int = 3, n: int = 1, first: int = 5):
        """The handler's part: what comes of it is the body of a response whose status is 200."""
        return self.generate(prompt_of(length, first), SamplingParams(n=n, max_tokens=4), name)


def prompt_of(length: int = 3, first: int = 5) -> dict:
    return {"type": "token", "prompt_token_ids": [first] + [5] * (length - 1)}


class Turns(Engine):
    """Asked as the Responses API does: `generate` is called by what is read as the response's body."""

    def ask(self, name: str, length: int = 3, **_):
        async def body():
            async for output in Engine.ask(self, name, length):
                yield output

        return let_in(self, prompt_of(length), SamplingParams(max_tokens=4), name, body())


async def begin(streams) -> list[asyncio.Task]:
    """Send the bodies: each runs until it waits for the engine's first answer."""
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0.05)
    return tasks


async def end(tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def burst(engine: Engine, names: str, **request) -> tuple[list, str]:
    """The streams of those that were let in, and the names of those that were refused."""
    streams, refused = [], ""
    for name in names:
        try:
            engine.check_admission(request.get("n", 1))
            streams.append(engine.ask(name, **request))
        except (QueueOverflowError, MaxQueuedTokensError):
            refused += name
    return streams, refused


def run(engine: Engine, names: str, **request) -> tuple[str, int, list]:
    """Refused before the response; requests that reached the engine; what failed inside a response."""

    async def all_at_once():
        streams, refused = burst(engine, names, **request)
        tasks = await begin(streams)
        late = [task.exception() for task in tasks if task.done()]
        registered = len(engine.output_processor.request_states)
        await end(tasks)
        return refused, registered, late

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("engine", [Engine, Turns])
def test_a_burst_is_refused_before_any_response_begins(engine):
    assert run(engine(reqs=2), "abcde") == ("cde", 2, [])


def test_sequences_count():
    assert run(Engine(reqs=5), "abc", n=2) == ("c", 4, [])


@pytest.mark.parametrize("engine", [Engine, Turns])
def test_prompt_tokens_count(engine):
    """Upstream refuses once the backlog has reached the limit, so the request that reaches it is let in."""
    assert run(engine(tokens=10), "abcd", length=6) == ("cd", 2, [])


def test_no_limit_no_seats():
    engine = Engine()
    stream = engine.ask("a")
    assert not engine.seats.requests
    asyncio.run(stream.aclose())


def test_seats_become_requests_and_then_free():
    async def scenario():
        engine = Engine(reqs=2)
        tasks = await begin([engine.ask("a"), engine.ask("b")])
        assert engine.seats.requests == 0 and engine.get_num_unfinished_requests() == 2
        with pytest.raises(QueueOverflowError):
            engine.ask("c")
        await end(tasks)
        assert engine.get_num_unfinished_requests() == 0
        await end(await begin([engine.ask("d"), engine.ask("e")]))

    asyncio.run(scenario())


@pytest.mark.parametrize("make", [Engine, Turns])
def test_a_response_that_never_began_frees_its_seat(make):
    """A client that went away, or a second prompt of the same request that was refused."""
    engine = make(reqs=1)
    stream = engine.ask("a")
    with pytest.raises(QueueOverflowError):
        engine.ask("b")
    del stream
    gc.collect()
    engine.ask("b")


def test_an_invalid_request_frees_its_seat():
    async def scenario():
        engine = Engine(reqs=1)
        stream = engine.ask("a", first=0)
        with pytest.raises(VLLMValidationError):
            await anext(stream)
        assert engine.seats.requests == engine.seats.tokens == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", [Engine, Turns])
def test_two_requests_of_one_name(engine):
    assert run(engine(reqs=2), "aaa") == ("a", 2, [])


def test_others_are_not_let_in_through_a_seat_that_is_registered():
    """Registering awaits; what is asked meanwhile counts that request once, and is not taken for it."""

    async def scenario():
        engine = Engine(reqs=2)
        tasks = [asyncio.create_task(anext(engine.ask("a")))]
        for _ in range(20):
            await asyncio.sleep(0)
            assert engine.seats.requests + engine.get_num_unfinished_requests() == 1
            engine.check_admission(1)
            with pytest.raises(QueueOverflowError):
                engine.check_admission(2)
        await end(tasks)

    asyncio.run(scenario())
