"""Checkpoints, transformers' answers and engine runs, each made once for the session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from demo import reference
from demo.checkpoint.write import build

from .checkpoints import SHAPES
from .engine_run import EngineEnded, run_engine

HERE = Path(__file__).parent

#: A job takes 20 to 100 s of two idle cores, and several times that where something else runs beside it.
JOB_LIMIT = 800


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Directory of a checkpoint of `SHAPES`, by name."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def path(name: str) -> Path:
        build(root / name, SHAPES[name])
        return root / name

    return path


@pytest.fixture(scope="session")
def references(checkpoint):
    """transformers' model for a checkpoint, in bfloat16 as it is served."""
    return cache(lambda name: reference.load(checkpoint(name)))


@pytest.fixture(scope="session")
def run_job(checkpoint, tmp_path_factory):
    """Run batches of requests in one engine: see engine_job.py for the form of requests and results.

    The first argument is a name of `SHAPES` or a checkpoint's directory.
    """
    root = tmp_path_factory.mktemp("jobs")
    numbers = iter(range(1000))

    def run(
        name: str | Path,
        batches: list[list[dict]],
        *,
        partition: str | None = None,
        watch: Path | None = None,
        **engine,
    ) -> dict:
        model = name if isinstance(name, Path) else checkpoint(name)
        folder = root / str(next(numbers))
        folder.mkdir()
        environment = {"VLLM_PP_LAYER_PARTITION": partition} if partition else {}
        if watch:
            environment |= {"WATCH_FILES": str(watch), "PYTHONPATH": str(HERE / "watch")}
        try:
            return run_engine(folder, model, batches, engine, environment, JOB_LIMIT)
        except EngineEnded as ended:
            pytest.fail(str(ended))

    return run


#: (what, largest difference of answers' log-probabilities, prompt positions' differences)
_FIGURES = pytest.StashKey[list[tuple[str, float, str]]]()


@pytest.fixture
def figures(request):
    """Note what was measured; the end of the run lists the largest by name."""
    noted = request.config.stash.setdefault(_FIGURES, [])
    return lambda *entry: noted.append(entry)


def pytest_terminal_summary(terminalreporter, config) -> None:
    noted = config.stash.get(_FIGURES, [])
    if not noted:
        return
    terminalreporter.section("difference from transformers, log-probabilities")
    for what in dict.fromkeys(entry[0] for entry in noted):
        entries = [entry for entry in noted if entry[0] == what]
        worst = max(entries, key=lambda entry: entry[1])
        prompt = f"; prompt positions: {worst[2]}" if worst[2] else ""
        terminalreporter.write_line(f"{what} ({len(entries)}): answers at most {worst[1]:.3f}{prompt}")
