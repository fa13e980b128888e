"""A streamed response that fails ends with the error and the failed response: upstream's generator over a stub engine."""

import asyncio
import json

import pytest

from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.ended import EndedResponses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import GenerationError, QueueOverflowError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError


def handler() -> EndedResponses:
    """The handler, of which a stream needs little."""
    made = object.__new__(EndedResponses)
    made.use_harmony = False
    made.tool_server = None
    return made


def output(text: str) -> RequestOutput:
    part = CompletionOutput(0, text, [5], None, None)
    return RequestOutput("r", None, [5, 5], None, [part], finished=False)


async def turns(context: SimpleContext, texts: list[str], error: Exception | None):
    """What the engine's client yields: outputs, then the refusal of a later turn or a failure."""
    for text in texts:
        context.append_output(output(text))
        yield context
    if error is not None:
        raise error


def stream(error: Exception | None, texts=("a", "b")):
    request = ResponsesRequest(model="m", input="x", stream=True)
    context = SimpleContext()
    return handler().responses_stream_generator(
        request, SamplingParams(max_tokens=4), turns(context, list(texts), error), context, "m", None, None
    )


def sent(events) -> list[dict]:
    """The events as a client reads them."""

    async def read():
        return [part async for part in _convert_stream_to_sse_events(events)]

    found = []
    for part in asyncio.run(read()):
        name, data = part.strip().split("\n", 1)
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize(
    ("error", "status", "reason", "message"),
    [
        (VLLMValidationError("no such token", parameter="logit_bias"), 400, "invalid_prompt", "no such token"),
        (QueueOverflowError(), 503, "rate_limit_exceeded", ""),
        (GenerationError("its logits are not a number"), 500, "server_error", "its logits are not a number"),
        (EngineDeadError(), 500, "server_error", EngineDeadError.CLIENT_MESSAGE),
        (RuntimeError("unforeseen"), 500, "server_error", "unforeseen"),
    ],
)
@pytest.mark.parametrize("texts", [(), ("a", "b")])
def test_the_error_and_the_failed_response_come_last(error, status, reason, message, texts):
    *before, said, last = sent(stream(error, texts))
    assert [event["type"] for event in before[:2]] == ["response.created", "response.in_progress"]
    assert [event["delta"] for event in before if event["type"] == "response.output_text.delta"] == list(texts)
    assert said["type"] == "error" and said["code"] == str(status)
    assert said["error"]["code"] == status and said["error"]["message"] == said["message"]
    assert message in said["message"] and "\n" not in said["message"]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed" and last["response"]["id"] == before[0]["response"]["id"]
    assert last["response"]["error"] == {"code": reason, "message": said["message"]}


def test_the_parameter_is_named():
    *_, said, _last = sent(stream(VLLMValidationError("no such token", parameter="logit_bias"), ()))
    assert said["param"] == said["error"]["param"] == "logit_bias"


def test_the_client_raises_it():
    """`openai` reads the field `error` of any event."""
    import httpx
    from openai import APIError, OpenAI

    events = stream(VLLMValidationError("no such token", parameter="logit_bias"), ())

    async def body():
        return "".join([part async for part in _convert_stream_to_sse_events(events)])

    text = asyncio.run(body())
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=text)
    )
    client = OpenAI(base_url="http://test/v1", api_key="none", http_client=httpx.Client(transport=transport))
    with pytest.raises(APIError, match="no such token"):
        list(client.responses.create(model="m", input="x", stream=True))


def test_before_any_event_there_is_no_response_to_end():
    broken = handler()
    del broken.use_harmony
    (said,) = sent(
        broken.responses_stream_generator(
            ResponsesRequest(model="m", input="x"), SamplingParams(), None, SimpleContext(), "m", None, None
        )
    )
    assert said["type"] == "error" and said["code"] == "500"


def test_a_reader_of_a_background_response_is_done():
    async def scenario():
        made = handler()
        made.event_store = {}

        async def types_of(reader):
            return [event.type async for event in reader]

        request = ResponsesRequest(model="m", input="x", stream=True)
        context = SimpleContext()
        await made._run_background_request_stream(
            request,
            SamplingParams(max_tokens=4),
            turns(context, ["a"], VLLMValidationError("no such token")),
            context,
            "m",
            None,
            None,
        )
        reader = made.responses_background_stream_generator(request.request_id)
        return await asyncio.wait_for(types_of(reader), 5)

    assert asyncio.run(scenario())[-2:] == ["error", "response.failed"]
