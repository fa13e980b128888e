"""A refusal carries its status and when to come back, through the API server's own error handling."""

import json
from types import SimpleNamespace

from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import QueueOverflowError, VLLMValidationError


def answer(error: Exception):
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)

    @app.get("/")
    async def fail():
        raise error

    return TestClient(app, raise_server_exceptions=False).get("/")


def test_refused():
    refused = answer(QueueOverflowError())
    assert refused.status_code == refused.json()["error"]["code"] == 503
    assert int(refused.headers["Retry-After"]) > 0


def test_the_client_s_own_fault_gets_no_invitation():
    wrong = answer(VLLMValidationError("too long"))
    assert wrong.status_code == 400
    assert "Retry-After" not in wrong.headers


def test_messages_api():
    refused = translate_error_response(create_error_response(QueueOverflowError()))
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert json.loads(refused.body)["error"]["type"] == "overloaded_error"
