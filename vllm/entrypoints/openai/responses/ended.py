# SPDX-License-Identifier: Apache-2.0
"""The Responses API, whose streams say how they ended.

A streamed response has its status line before the engine has looked at the request.  What is refused or fails after that
(parameters out of range, a later turn that finds the server full, damaged logits, a dead engine) left a stream that just
stops: `/v1/chat/completions` sends an error there.  Here the stream ends with two events, as its clients know them:

    error             the fields of the API's event, and `error` as the other endpoints send it, which `openai` raises
    response.failed   the response with status "failed", for those who wait for the last event of one
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent

from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorInfo
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from vllm.logger import init_logger

logger = init_logger(__name__)


class ErrorEvent(ResponseErrorEvent):
    """The API's event of an error, with the error of a response that has no other content."""

    error: ErrorInfo


class FailedEvent(ResponseFailedEvent):
    """The API's event, of a response as it was in the stream's first event."""

    response: dict[str, Any]  # type: ignore[assignment]


class EndedResponses(OpenAIServingResponses):
    """Upstream's handler, none of whose streams stops without a last event."""

    async def responses_stream_generator(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Upstream's events, and the last ones of a stream that fails."""
        sent, response = 0, {}
        async with aclosing(super().responses_stream_generator(*args, **kwargs)) as events:
            try:
                async for event in events:
                    if not sent:
                        response = event.response.model_dump(mode="json", by_alias=True)
                    sent += 1
                    yield event
            except Exception as error:
                for event in last_events(error, response, sent):
                    yield event

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> str:
        # Its one caller here would read the text as an event, of a union in which there is none for errors.
        raise e


def last_events(error: Exception, response: dict[str, Any], sent: int) -> Iterator[ErrorEvent | FailedEvent]:
    """What to send after `sent` events of `response`, which is empty if there was none."""
    info = create_error_response(error).error
    if info.code >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, GenerationError):
        logger.error("A streamed response failed.", exc_info=error)
    yield ErrorEvent(
        type="error", code=str(info.code), message=info.message, param=info.param, sequence_number=sent, error=info
    )
    if response:
        reason = {"code": reason_of(info.code), "message": info.message}
        failed = response | {"status": "failed", "error": reason}
        yield FailedEvent(type="response.failed", sequence_number=sent + 1, response=failed)


def reason_of(status: int) -> str:
    """The API's word for a status: it has few, and none for a parameter that is refused but for the prompt."""
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
