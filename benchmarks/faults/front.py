"""What stands before the engine struck: the API server, one of several, or the process that started those.

A stopped one goes on after a while (someone paused it, or a debugger held it), and is to have lost nothing.
"""

import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults import leftovers, scene
from benchmarks.faults.limits import load
from benchmarks.faults.stream import Stream
from demo.server import Server

#: Seconds that a process stays stopped: longer than the silence after which the engine's watchers would kill.
STOPPED = 25.0
TOKENS = 600
#: Seconds in which a request that someone serves is answered.
ANSWERED_WITHIN = 15.0
PROBES = 6
#: Seconds after a SIGKILL within which everything must be gone.
PATIENCE = 60.0


@dataclass(frozen=True)
class Front:
    """Who is struck: `one` of `count` API servers, the one that serves the request, or the `parent` of them all."""

    fault: str
    who: str
    count: int

    @property
    def name(self) -> str:
        who = {"one": "API server" if self.count == 1 else f"one of {self.count} API servers"}
        return f"{self.fault} of {who.get(self.who, f'the parent of {self.count} API servers')}"


FRONTS = [
    Front(fault, who, count)
    for fault in ("SIGSTOP", "SIGKILL")
    for who, count in (("one", 1), ("one", 2), ("parent", 2))
]


def play(checkpoint: Path, stages: int, env: dict[str, str], only: str = "") -> Iterator[dict]:
    for front in FRONTS:
        if only in front.name:
            with tempfile.TemporaryDirectory() as scratch:
                yield _play(front, checkpoint, stages, Path(scratch) / "serve.log", env)


def _play(front: Front, checkpoint: Path, stages: int, log: Path, env: dict[str, str]) -> dict:
    arguments = ["--api-server-count", str(front.count)] if front.count > 1 else []
    with scene.start(checkpoint, stages, log, env, arguments) as server:
        server.wait_until_healthy(scene.READY_LIMIT, lambda seconds, milestone: None)
        stream = ask(server, TOKENS)
        stream.need_tokens(5, "to interrupt")
        struck = _who(front, server)
        measure = stopped if front.fault == "SIGSTOP" else killed
        return {"limit": front.name, **measure(server, stream, struck)}


def ask(server: Server, length: int) -> Stream:
    return scene.ask(server, scene.PROMPT[:40], length)


def _who(front: Front, server: Server) -> psutil.Process:
    assert server.process is not None
    if front.count == 1 or front.who == "parent":
        return psutil.Process(server.process.pid)
    return next(process for process in leftovers.of_session(server.process.pid) if _serves(process, server.port))


def _serves(process: psutil.Process, port: int) -> bool:
    """Whether a client's connection to the port ends in this process."""
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED for connection in connections
    )


def stopped(server: Server, stream: Stream, struck: psutil.Process) -> dict:
    """Stop a process for longer than anyone's patience, and let it go on."""
    struck.send_signal(signal.SIGSTOP)
    probes = [ask(server, 5) for _ in range(PROBES)]
    deadline = time.monotonic() + STOPPED
    for probe in probes:
        probe.ended.wait(min(ANSWERED_WITHIN, max(deadline - time.monotonic(), 0)))
    meanwhile = sum(probe.end == "done" for probe in probes)
    time.sleep(max(deadline - time.monotonic(), 0))
    struck.send_signal(signal.SIGCONT)
    for waiting in [stream, *probes]:
        waiting.ended.wait(120)
    afterwards = ask(server, 5)
    afterwards.ended.wait(60)
    assert server.process is not None
    return {
        "stopped_s": STOPPED,
        "tokens": stream.tokens,
        "tokens_asked": stream.length,
        "answered_meanwhile": meanwhile,
        "answered_in_the_end": sum(probe.end == "done" for probe in probes),
        "sent_meanwhile": PROBES,
        "answered_afterwards": afterwards.end == "done",
        "kv_cache_usage": load(server)["usage"],
        "runs": server.process.poll() is None,
    }


def killed(server: Server, stream: Stream, struck: psutil.Process) -> dict:
    """Kill a process that has asked nobody to end."""
    assert server.process is not None
    leader, port = server.process.pid, server.port
    names = leftovers.shared_memory(leader)
    struck.send_signal(signal.SIGKILL)
    start = time.monotonic()
    while (left := leftovers.of_session(leader)) and time.monotonic() - start < PATIENCE:
        # Reaps the leader, and notes its status.
        server.process.poll()
        time.sleep(0.2)
    seconds = time.monotonic() - start
    stream.ended.wait(1.0)
    return {
        "client": stream.end or "nothing",
        "client_s": round(stream.ended_at - start, 1) if stream.ended.is_set() else None,
        "gone_s": None if left else round(seconds, 1),
        "exit_status": server.process.poll(),
        **leftovers.after(leader, names, port, within=0),
    }
