"""`vllm serve` as a child process: started, waited for, and gone again whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


class ServerFailed(RuntimeError):
    """The server ended or did not become ready; the message holds the end of its log."""


def free_port() -> int:
    """A port nobody listens on now.  Another process may take it first; the server then says so and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A running `vllm serve`; use as a context manager.

    The child leads a process group of its own, so that its engine and worker processes go with it, and Ctrl-C reaches
    them through `stop` rather than as a traceback from each.
    """

    def __init__(
        self, checkpoint: Path, *, stages: int, port: int, log: Path, arguments: list[str], env: dict[str, str]
    ):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            str(checkpoint),
            "--served-model-name",
            "qwen4-exp-demo",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--pipeline-parallel-size",
            str(stages),
            *arguments,
        ]
        self.env = env
        self.started = 0.0
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "Server":
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_exception) -> None:
        self.stop()

    def wait_until_healthy(self, limit: float, on_tick: Callable[[float, str], None]) -> float:
        """Seconds from the start until /health answers; `on_tick` gets the seconds so far and the log's last words."""
        assert self.process is not None
        while (seconds := time.monotonic() - self.started) < limit:
            if self.process.poll() is not None:
                raise ServerFailed(f"vllm serve ended with status {self.process.returncode}.\n{self.tail()}")
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return time.monotonic() - self.started
            on_tick(seconds, self.milestone())
            time.sleep(0.5)
        raise ServerFailed(f"vllm serve was not ready after {limit:.0f} s.\n{self.tail()}")

    #: Phrases of the log, in the order in which they appear, and what they mean to someone who waits.
    MILESTONES = (
        ("Initializing a V1 LLM engine", "planning"),
        ("rank 0 in world size", "stages started"),
        ("Starting to load model", "loading weights"),
        ("Loading weights took", "weights loaded"),
        ("KV cache size", "cache allocated"),
        ("init engine", "warming up"),
        ("Starting vLLM server", "opening the port"),
    )

    def milestone(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        reached = [meaning for phrase, meaning in self.MILESTONES if phrase in text]
        return reached[-1] if reached else "importing"

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"Last lines of {self.log}:\n" + "\n".join(f"  {line}" for line in text)

    def stop(self, patience: float = 20.0, grace: float = 15.0) -> None:
        """Ask the server to end and wait until its group is gone, or end what is left of it.  Safe to call twice.

        Args:
            patience: seconds for the leader, which ends its engine in good order
            grace: seconds for the others once the leader is gone; they notice by themselves within ten
        """
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            # The others need no signal of their own yet.
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # A stage that is killed while it cleans up leaves its shared memory behind, until the machine restarts.
        deadline = time.monotonic() + grace
        while _group_runs(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _group_runs(leader: int) -> bool:
    """Whether a process of the group runs.  A zombie does not, and may stay one where nobody reaps orphans."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
