"""A server over two Ray nodes, with a stage on each, and what is seen after something of it is gone."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.faults import leftovers, scene
from benchmarks.faults.stream import Stream
from benchmarks.ray_stages.cluster import Node, RayCluster
from demo.run import ENGINE
from demo.server import Server, free_port

#: The server's own clock is read four times a second.
LOOK = 0.25


@dataclass(frozen=True)
class Case:
    """What is struck and with which signal; `what` is the row's name in the page.

    `ray` is for every node's `ray start`, `loading` strikes while the last stage loads rather than while a client reads
    its answer.
    """

    name: str
    what: str
    signal: str
    ray: tuple[tuple[str, str], ...] = ()
    loading: bool = False

    def targets(self, server: Server, node: Node) -> list[psutil.Process]:
        if self.loading:
            return [node.loading()]
        if self.name.startswith("stage"):
            return [node.stage(1)]
        if self.name.startswith("raylet"):
            return [node.raylet()]
        if self.name.startswith("engine"):
            return [leftovers.engine(server.process.pid)]
        return node.processes()


#: Ray's own way to hear sooner of a machine that says nothing: three checks a second apart, three seconds each.
PROMPT_CHECKS = (
    ("RAY_health_check_period_ms", "1000"),
    ("RAY_health_check_timeout_ms", "3000"),
    ("RAY_health_check_failure_threshold", "3"),
)

CASES = (
    Case("stage-killed-load", "last stage's process killed while it loads", "SIGKILL", loading=True),
    Case("stage-killed", "last stage's process killed", "SIGKILL"),
    Case("stage-stopped", "last stage's process stopped", "SIGSTOP"),
    Case("raylet-killed", "raylet of its machine killed", "SIGKILL"),
    Case("machine-killed", "all Ray processes of its machine killed", "SIGKILL"),
    Case("machine-silent", "all of them stopped, as of a machine without power or network", "SIGSTOP"),
    Case(
        "machine-silent-prompt",
        "the same, with Ray's health checks as in the commands above",
        "SIGSTOP",
        ray=PROMPT_CHECKS,
    ),
    Case("engine-killed", "engine killed", "SIGKILL"),
)


@dataclass
class Seen(scene.Watch):
    """The same over two machines."""

    other_stage_gone_s: float | None = None
    left_processes: list[str] | None = None
    left_shared_memory: list[str] | None = None


def serve(checkpoint: Path, log: Path, cluster: RayCluster, arguments: list[str] | None = None) -> Server:
    return Server(
        checkpoint,
        stages=2,
        port=free_port(),
        log=log,
        arguments=[*ENGINE, "--distributed-executor-backend", "ray", *(arguments or [])],
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **cluster.env},
    )


def play(case: Case, checkpoint: Path, patience: float) -> dict:
    """One cluster, one server, one fault."""
    with RayCluster(2, env={0: dict(case.ray), 1: dict(case.ray)}) as cluster:
        log = cluster.folder / "serve.log"
        with serve(checkpoint, log, cluster) as server:
            stream = None
            if case.loading:
                _wait_for_loading(cluster.nodes[1], server)
            else:
                server.wait_until_healthy(scene.READY_LIMIT * 2, lambda seconds, milestone: None)
                stream = Stream(server.port, [7 + n for n in range(40)], length=1900).start()
                stream.need_tokens(5, "to interrupt")
            seen = strike(case, server, cluster, stream, patience)
        if folder := os.environ.get("FAULT_LOG"):
            Path(folder, f"ray-{case.name}.log").write_bytes(log.read_bytes())
        return {"case": case.name} | asdict(seen) | {"patience_s": patience, "ray": dict(case.ray)}


def _wait_for_loading(node: Node, server: Server) -> None:
    deadline = time.monotonic() + scene.READY_LIMIT
    while node.loading() is None:
        if time.monotonic() > deadline or server.process.poll() is not None:
            raise RuntimeError(f"the last stage did not begin to load.\n{server.tail()}")
        time.sleep(0.1)


def strike(case: Case, server: Server, cluster: RayCluster, stream: Stream | None, patience: float) -> Seen:
    """Deliver the signal and watch until the server has ended or `patience` seconds have passed."""
    assert server.process is not None
    targets = case.targets(server, cluster.nodes[1])
    first_stage = cluster.nodes[0].loading() if case.loading else cluster.nodes[0].stage(0)
    names = leftovers.shared_memory(server.process.pid)
    struck = time.monotonic()
    for process in targets:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(getattr(signal, case.signal))
    seen = Seen()
    while time.monotonic() < struck + patience:
        now = scene.since(struck)
        if stream is not None and seen.health_s is None and (bad := scene.bad_health(server.url)):
            seen.health, seen.health_s = bad, now
        if seen.exit_s is None and server.process.poll() is not None:
            seen.exit_status, seen.exit_s = server.process.returncode, now
        if seen.other_stage_gone_s is None and not (first_stage and first_stage.is_running()):
            seen.other_stage_gone_s = now
        if seen.exit_s is not None and seen.other_stage_gone_s is not None:
            break
        time.sleep(LOOK)
    seen.note_client(stream, struck)
    left = leftovers.after(server.process.pid, names, server.port)
    seen.left_processes, seen.left_shared_memory = left["left_processes"], left["left_shared_memory"]
    return seen
