"""A private Ray cluster of several nodes on this machine, gone without a trace when the block ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.faults import leftovers
from demo.server import free_port

START_LIMIT = 120
#: Bytes; Ray's least.  vLLM keeps nothing in the object store, and each node takes this much of /dev/shm.
OBJECT_STORE = 80 << 20


class ClusterFailed(RuntimeError):
    """A node did not start; the message holds the end of its log."""


class Node:
    """One `ray start --block`, which leads a session of everything that belongs to the node."""

    def __init__(self, name: str, arguments: list[str], log: Path, env: dict[str, str]):
        self.name = name
        self.log = log
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
                start_new_session=True,
            )

    def wait_until_started(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while "Ray runtime started" not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ClusterFailed(
                    f"Ray node {self.name} did not start:\n{self.log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        return leftovers.of_session(self.process.pid)

    def raylet(self) -> psutil.Process:
        return next(process for process in self.processes() if process.name() == "raylet")

    def node_id(self) -> str:
        """The id by which Ray knows the node, from its raylet's own command line."""
        arguments = self.raylet().cmdline()
        return next(argument.split("=", 1)[1] for argument in arguments if argument.startswith("--node_id="))

    def stage(self, number: int) -> psutil.Process | None:
        """The process of a pipeline stage if it is on this node."""
        return leftovers.worker(self.process.pid, number)

    def loading(self) -> psutil.Process | None:
        """The process of a stage that loads and has not named itself yet."""
        call = "ray::StageWorkerProc.initialize_worker"
        return next((process for process in self.processes() if leftovers.title(process).startswith(call)), None)


class RayCluster:
    """Use as a context manager; `env` makes a server find it.

    Nothing is shared with a cluster that a developer may be running: every port is drawn, the files have a directory of
    their own, and the address is handed on in the environment rather than found.

    Args:
        nodes: how many; the first is the head
        env: per node, further environment variables of its `ray start`
    """

    def __init__(self, nodes: int = 2, env: dict[int, dict[str, str]] | None = None):
        self.count = nodes
        self.node_env = env or {}
        self.nodes: list[Node] = []
        # Short: Unix sockets lie below it, and their paths end at 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {"RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}

    def __enter__(self) -> "RayCluster":
        try:
            for number in range(self.count):
                self._start(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exception) -> None:
        self.stop()

    def _start(self, number: int) -> None:
        arguments = ["--block", "--disable-usage-stats", "--num-cpus", "1", "--object-store-memory", str(OBJECT_STORE)]
        # Ports of workers from a fixed range would be those of another cluster's, too.
        arguments += ["--min-worker-port", "0", "--max-worker-port", "0"]
        if number == 0:
            arguments += ["--head", "--port", self.address.split(":")[1], "--temp-dir", str(self.folder)]
            arguments += ["--include-dashboard", "false", "--dashboard-port", str(free_port())]
            arguments += ["--ray-client-server-port", str(free_port())]
        else:
            arguments += ["--address", self.address]
        environment = {"RAY_USAGE_STATS_ENABLED": "0", **self.node_env.get(number, {})}
        node = Node(str(number), arguments, self.folder / f"node{number}.log", environment)
        self.nodes.append(node)
        node.wait_until_started()

    def stop(self) -> None:
        """End all nodes, whatever state they are in, and remove their files.  Safe to call twice."""
        for node in reversed(self.nodes):
            for process in node.processes():
                with suppress(psutil.Error):
                    # One that was stopped would not hear of anything else.
                    process.send_signal(signal.SIGCONT)
            node.process.terminate()
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(15)
        for node in self.nodes:
            for process in node.processes():
                with suppress(psutil.Error):
                    process.kill()
            node.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
