"""A small whole checkpoint, and configurations that would serve it."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from demo.checkpoint.geometry import geometry
from demo.checkpoint.write import build
from vllm.engine import verified_checkpoint


@pytest.fixture(scope="session")
def intact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verified") / "intact"
    build(folder, geometry("tiny"))
    return folder


@pytest.fixture
def model(intact, tmp_path) -> Path:
    """A copy of its own."""
    shutil.copytree(intact, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def config_of():
    """``config_of(model, check="warn", load_format=…)``: as much of a configuration as is looked at."""

    def make(model, check=None, load_format="auto", architecture="Qwen4ExpForCausalLM", drafts=None, **changes):
        return SimpleNamespace(
            additional_config={} if check is None else {verified_checkpoint.KEY: check},
            speculative_config=drafts,
            load_config=SimpleNamespace(load_format=load_format),
            model_config=SimpleNamespace(
                **{"model": str(model), "architecture": architecture, "hf_overrides": {}, "hf_config_path": None}
                | changes
            ),
        )

    return make


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """(level, text) of everything that is logged."""
    texts: list[tuple[str, str]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            verified_checkpoint.logger,
            level,
            lambda text, *values, level=level: texts.append((level, text % values if values else text)),
        )
    return texts


@pytest.fixture
def platform(monkeypatch):
    """``platform("cuda", 86)``: what is served on."""

    def configure(kind: str, capability: int = 0) -> None:
        version = SimpleNamespace(
            to_int=lambda: capability, as_version_str=lambda: f"{capability // 10}.{capability % 10}"
        )
        monkeypatch.setattr(
            verified_checkpoint,
            "current_platform",
            SimpleNamespace(
                is_cpu=lambda: kind == "cpu",
                is_cuda=lambda: kind == "cuda",
                get_device_capability=lambda: version if capability else None,
            ),
        )

    return configure
