"""A malformed request is told what is wrong in the type that it meant."""

import pytest
from pydantic import ValidationError

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.closest_errors import closest_errors

HELLO = {"role": "user", "content": "Hello"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "ok"}


def without(item: dict, field: str) -> dict:
    return {key: value for key, value in item.items() if key != field}


def refused(**fields) -> list[tuple[str, str]]:
    """(place, message) of the errors of a request with these fields."""
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"input": "Hello"} | fields)
    return [(".".join(map(str, error["loc"])), error["msg"]) for error in closest_errors(caught.value.errors())]


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"input": [HELLO, without(CALL, "name")]}, "input.1.name", "Field required"),
        ({"input": [HELLO, CALL, without(OUTPUT, "output")]}, "input.2.output", "Field required"),
        ({"input": [HELLO, CALL, OUTPUT | {"output": {"a": 1}}]}, "input.2.output", "Input should be a valid string"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role", "Input should be 'user', 'assistant', 'system' or 'developer'"),
        ({"input": 7}, "input", "Input should be a valid string"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "Field required"),
        ({"tool_choice": "maybe"}, "tool_choice", "Input should be 'none', 'auto' or 'required'"),
        ({"temperature": "a"}, "temperature", "Input should be a valid number, unable to parse string as a number"),
    ],
)  # fmt: skip
def test_one_error_of_the_type_that_was_meant(fields, place, message):
    assert refused(**fields) == [(place, message)]


def test_an_unknown_type_is_told_the_known_ones():
    ((place, message),) = refused(input=[HELLO, {"type": "telepathy", "call_id": "c1"}])
    assert place == "input.1.type"
    assert message.startswith("Input should be one of 'message', 'file_search_call', ")
    assert "'function_call_output'" in message and message.count("'function_call'") == 1


def test_every_wrong_field_is_named():
    assert refused(temperature="a", tools=[{"type": "function"}], input=[without(CALL, "name"), without(OUTPUT, "output")]) == [
        ("input.0.name", "Field required"),
        ("input.1.output", "Field required"),
        ("temperature", "Input should be a valid number, unable to parse string as a number"),
        ("tools.0.name", "Field required"),
    ]  # fmt: skip


def test_errors_of_another_form_stay():
    odd = [{"loc": ("body",), "msg": "a"}, "text"]
    assert closest_errors(odd) is odd
    assert closest_errors([]) == []
