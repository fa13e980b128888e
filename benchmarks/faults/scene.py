"""One case from the start of the server to what is left of it."""

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import leftovers
from benchmarks.faults.cases import ENGINE, Case
from benchmarks.faults.stream import Stream
from benchmarks.record import ROOT
from demo.server import Server, free_port

READY_LIMIT = 480
#: Small, so that a long prompt is many steps of prefill.
CHUNK = 32
MODEL_LENGTH = 2048
PROMPT = [7 + n % 200 for n in range(1500)]
ARGUMENTS = [
    *("--max-model-len", str(MODEL_LENGTH), "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--max-num-batched-tokens", str(CHUNK), "--no-enable-prefix-caching"),
    *("--worker-extension-cls", "benchmarks.faults.out_of_memory.OutOfMemory"),
]


@dataclass
class Watch:
    """Seconds since the fault; None where it did not happen within the patience."""

    client: str = "no request"
    client_s: float | None = None
    health: str = ""
    health_s: float | None = None
    exit_status: int | None = None
    exit_s: float | None = None

    def note_client(self, stream: Stream | None, struck: float) -> None:
        """How and when the client's request ended; one that just did is given a second to notice."""
        if stream is not None:
            stream.ended.wait(1.0)
            self.client = f"{stream.end}: {stream.detail}" if stream.ended.is_set() else "nothing"
            self.client_s = round(stream.ended_at - struck, 1) if stream.ended.is_set() else None


def play(
    case: Case,
    checkpoint: Path,
    stages: int,
    patience: float,
    env: dict[str, str],
    arguments: list[str] | None = None,
) -> dict:
    """Run one case; `patience` is how many seconds after the fault everything must have ended."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        trigger = folder / "now"
        server = start(checkpoint, stages, folder / "serve.log", env | _fault_environment(case, trigger), arguments)
        with server:
            leader = server.process.pid
            stream = _bring_into_phase(case, server)
            names = leftovers.shared_memory(leader)
            struck = time.monotonic()
            _strike(case, leader, trigger)
            if case.phase == "idle":
                # A server that did not notice says so to the next client at the latest.
                with suppress(subprocess.TimeoutExpired):
                    server.process.wait(min(10.0, patience / 2))
                stream = None if server.process.poll() is not None else ask(server, PROMPT[:40])
            watch = _watch(server, stream, struck, patience)
            if os.environ.get("FAULT_LOG"):
                Path(os.environ["FAULT_LOG"], f"{case.name}.log").write_bytes(server.log.read_bytes())
            left = leftovers.after(leader, names, server.port)
            leftovers.remove(leader, names)
        return {
            "fault": case.fault,
            "phase": case.phase,
            "stage": case.stage,
            **vars(watch),
            "patience_s": patience,
            **left,
        }


def start(checkpoint: Path, stages: int, log: Path, env: dict[str, str], arguments: list[str] | None = None) -> Server:
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT), **env}
    return Server(
        checkpoint, stages=stages, port=free_port(), log=log, arguments=[*ARGUMENTS, *(arguments or [])], env=env
    )


def _fault_environment(case: Case, trigger: Path) -> dict[str, str]:
    if not case.raising_call:
        return {}
    env = {"FAULT_CALL": case.raising_call, "FAULT_STAGE": str(case.stage)}
    return env if case.phase in ("load", "warm-up") else env | {"FAULT_FILE": str(trigger)}


def _bring_into_phase(case: Case, server: Server) -> Stream | None:
    if case.phase in ("load", "warm-up"):
        _wait_for_stage(server, max(case.stage, 0))
        return None
    server.wait_until_healthy(READY_LIMIT, lambda seconds, milestone: None)
    if case.phase == "idle":
        return None
    stream = ask(server, PROMPT if case.phase == "prefill" else PROMPT[:40])
    if case.phase == "prefill":
        time.sleep(0.5)
        if stream.tokens:
            raise RuntimeError("the prompt was read before the fault: it is no case of prefill")
    else:
        stream.need_tokens(5, "to interrupt")
    return stream


def ask(server: Server, prompt: list[int], length: int | None = None) -> Stream:
    """Ask for `length` tokens, or for as many as there is room for."""
    return Stream(server.port, prompt, MODEL_LENGTH - len(prompt) if length is None else length).start()


def _wait_for_stage(server: Server, stage: int) -> None:
    deadline = time.monotonic() + READY_LIMIT
    while leftovers.worker(server.process.pid, stage) is None:
        if time.monotonic() > deadline or server.process.poll() is not None:
            raise RuntimeError(f"stage {stage} did not start.\n{server.tail()}")
        time.sleep(0.2)


def _strike(case: Case, leader: int, trigger: Path) -> None:
    if case.fault == "MemoryError":
        trigger.touch()
    else:
        struck = leftovers.engine(leader) if case.stage == ENGINE else leftovers.worker(leader, case.stage)
        struck.send_signal(getattr(signal, case.fault))


def _watch(server: Server, stream: Stream | None, struck: float, patience: float) -> Watch:
    watch = Watch()
    while time.monotonic() < struck + patience:
        if watch.health_s is None and (bad := bad_health(server.url)):
            watch.health, watch.health_s = bad, since(struck)
        if server.process.poll() is not None:
            watch.exit_status, watch.exit_s = server.process.returncode, since(struck)
            break
        time.sleep(0.25)
    watch.note_client(stream, struck)
    watch.health = watch.health or "200"
    return watch


def since(struck: float) -> float:
    return round(time.monotonic() - struck, 1)


def bad_health(url: str) -> str:
    """Why /health is not good; empty where it is."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return ""
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (urllib.error.URLError, OSError) as error:
        return "refused" if "refused" in str(error).lower() else "no answer"
