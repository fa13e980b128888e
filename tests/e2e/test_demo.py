"""What the demonstration concludes, without a server."""

import subprocess
import sys

import pytest

from demo import report, run
from demo.checkpoint.layout import Layout
from demo.client import Answer
from demo.reference import Reference
from demo.server import Server, ServerFailed, free_port

LAYOUT = Layout(9, 870, 16, 657_408, 210_000_000, 576, 224_000_000)


def result(served: list[int], **changes) -> report.Result:
    answer = Answer([1, 2], served, [-0.5] * len(served), [0.2 + 0.1 * i for i in range(len(served))], "text")
    fields = dict(
        layout=LAYOUT,
        stages=3,
        partition="stage 0: layers 0-3; stage 1: layers 4-7",
        ready=30.0,
        answer=answer,
        reference=Reference([7, 8, 9], [-0.5, -0.6, -4.0], [3.0, 0.25, 3.0]),
        resident=1_000_000_000,
        resident_with_table=None,
    )
    return report.Result(**(fields | changes))


def test_equal_tokens_agree():
    same = result([7, 8, 9])
    assert same.agrees
    assert "all 3 tokens agree" in report.render(same)
    assert "10.0 tokens/s" in report.render(same)


@pytest.mark.parametrize("served", [[7, 1, 9], [7, 8], []], ids=["other token", "too short", "nothing"])
def test_anything_else_does_not(served):
    assert not result(served).agrees


def test_first_difference_is_named_with_its_margin():
    text = report.render(result([7, 1, 9]))
    assert "DIFFERENT from token 1" in text
    assert "0.25 apart" in text


def test_logprobs_after_the_first_difference_do_not_count():
    # Entry 1 differs by 0.1 and entry 2 by 3.5, but from entry 1 on the texts are not the same.
    assert result([7, 1, 9]).largest_logprob_difference == 0.0
    assert result([7, 8, 9]).largest_logprob_difference == pytest.approx(3.5)


def test_memory_says_what_was_measured():
    assert "1,210 MB with it loaded (computed" in report.render(result([7, 8, 9]))
    assert "1,300 MB with it loaded (measured" in report.render(result([7, 8, 9], resident_with_table=1_300_000_000))


def test_server_that_ends_shows_its_log(tmp_path):
    server = Server(tmp_path, stages=1, port=free_port(), log=tmp_path / "log", arguments=[], env={})
    server.command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with server, pytest.raises(ServerFailed, match="status 3(.|\n)*no such model"):
        server.wait_until_healthy(30, lambda seconds, milestone: None)


def test_stop_ends_the_whole_group(tmp_path):
    """The child's child would keep the port and the memory."""
    server = Server(tmp_path, stages=1, port=free_port(), log=tmp_path / "log", arguments=[], env={})
    # The leader ends on SIGTERM without its child, as an engine that crashes while it shuts down does.
    server.command = ["/bin/sh", "-c", "sleep 600 & echo $!; wait"]
    with server:
        while not (text := server.log.read_text().strip()):
            pass
    alive = subprocess.run(["ps", "-o", "stat=", "-p", text], capture_output=True, text=True).stdout.strip()
    assert alive in ("", "Z") or alive.startswith("Z")


def test_a_bad_checkpoint_directory_is_status_3(tmp_path):
    (tmp_path / "file").write_text("")
    arguments = run.argparse.Namespace(checkpoint=tmp_path / "file" / "below")
    with pytest.raises(run.DemoFailed) as failure:
        run._checkpoint(arguments, tmp_path)
    assert failure.value.status == 3
