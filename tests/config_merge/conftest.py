"""vLLM's loggers do not propagate; this makes one visible to caplog."""

import logging

import pytest


@pytest.fixture
def caplog_vllm(caplog):
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, "vllm"):
        yield caplog
    logger.removeHandler(caplog.handler)
