"""A real server whose last stage dies or hangs while a client reads its answer."""

import pytest

from benchmarks.faults.cases import Case
from benchmarks.faults.scene import play
from demo.checkpoint.geometry import geometry
from demo.checkpoint.write import build

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SILENCE_LIMIT = 4
#: A dead stage is known at once; the server's own look at its engine comes every five seconds.
CLIENT_WITHIN = {"SIGKILL": 10, "SIGSTOP": SILENCE_LIMIT + 10, "MemoryError": 10}
#: Idle machines need a third of this.
END_WITHIN = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "checkpoint"
    build(path, geometry("tiny"))
    return path


@pytest.mark.parametrize(
    "case",
    [Case("SIGKILL", "decode", 1), Case("SIGSTOP", "decode", 1), Case("MemoryError", "decode", 0)],
    ids=lambda case: case.name,
)
def test_everyone_hears_of_it_and_nothing_is_left(case, checkpoint):
    arguments = ["--watchdog-config.silence_limit", str(SILENCE_LIMIT)]
    seen = play(case, checkpoint, stages=2, patience=END_WITHIN, env={}, arguments=arguments)
    assert seen["client"].startswith("error:"), seen
    assert seen["client_s"] < CLIENT_WITHIN[case.fault], seen
    assert seen["health"] in ("503", "refused"), seen
    assert seen["exit_status"] == 1, seen
    assert not seen["left_processes"] and not seen["left_shared_memory"] and not seen["left_port"], seen
