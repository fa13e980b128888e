"""Schedulers over a configuration without weights, as the pipeline scheduler's tests make them."""

from tests.pipeline_scheduler.conftest import model, pipeline  # noqa: F401
