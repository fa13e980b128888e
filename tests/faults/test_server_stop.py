"""demo.server.Server.stop: children that clean up after the leader is gone are let finish, for a bounded time."""

import sys
import time
from pathlib import Path

from demo.server import Server

#: Ends at once when it is asked; its child notices a moment later and then has something to remove.
LEADER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
time.sleep(600)
"""
CHILD = """
import os, pathlib, sys, time
marker, seconds, starter = pathlib.Path(sys.argv[1]), float(sys.argv[2]), os.getppid()
marker.touch()
while os.getppid() == starter:
    time.sleep(0.02)
time.sleep(seconds)
marker.unlink()
"""


def stop_after(folder: Path, cleaning: float, grace: float) -> tuple[bool, float]:
    """Whether the child's marker is left, and the seconds that stopping took."""
    marker = folder / "segment"
    server = Server(folder, stages=1, port=1, log=folder / "log", arguments=[], env={})
    server.command = [sys.executable, "-c", LEADER, CHILD, str(marker), str(cleaning)]
    with server:
        while not marker.exists():
            time.sleep(0.02)
        start = time.monotonic()
        server.stop(grace=grace)
        return marker.exists(), time.monotonic() - start


def test_children_clean_up(tmp_path):
    left, seconds = stop_after(tmp_path, cleaning=0.5, grace=20)
    assert not left
    assert seconds < 15


def test_children_that_stay_are_ended(tmp_path):
    left, seconds = stop_after(tmp_path, cleaning=300, grace=0.5)
    assert left
    assert seconds < 15
