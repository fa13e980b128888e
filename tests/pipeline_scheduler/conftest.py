"""Schedulers over a configuration without weights."""

import logging
from collections.abc import Callable

import pytest

from demo.checkpoint.geometry import geometry, text_config

from .harness import Pipeline, Setup, build, engine_config


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """Directory with the config.json of a small Qwen4Exp, which is all that a scheduler needs of a model."""
    path = tmp_path_factory.mktemp("model")
    text_config(geometry("tiny"), eos_token_id=0, pad_token_id=0).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def pipeline(model) -> Callable[..., Pipeline]:
    """An idle pipeline: `pipeline(setup)` with the scheduler that is the default, or with a class."""

    def make(setup: Setup, scheduler=None) -> Pipeline:
        return Pipeline(build(engine_config(model, setup), setup, scheduler), setup)

    return make


@pytest.fixture(scope="session", autouse=True)
def quiet():
    """Hundreds of configurations, each of which would log what it resolved."""
    level = logging.getLogger("vllm").level
    logging.getLogger("vllm").setLevel(logging.WARNING)
    yield
    logging.getLogger("vllm").setLevel(level)
