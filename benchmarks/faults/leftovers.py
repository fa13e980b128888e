"""What a server leaves on the machine: processes of its session, names in /dev/shm, its port."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
#: Seconds that what the server started may take to end after it: a worker gives itself 5 to end in good order
#: (vllm/v1/executor/stage_pulse.py), and the resource tracker, which removes shared memory, is the last of all.
ENDED_WITHIN = 10.0


def of_session(leader: int) -> list[psutil.Process]:
    """Processes of the session that the server leads, zombies left out: those only wait for whoever started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def title(process: psutil.Process) -> str:
    """First word of the command line, which vLLM sets to e.g. VLLM::Worker_PP1; else the process's name."""
    try:
        return (process.cmdline() or [process.name()])[0].split("/")[-1]
    except psutil.Error:
        return "?"


def engine(leader: int) -> psutil.Process | None:
    return _titled(leader, "VLLM::EngineCore")


def worker(leader: int, stage: int) -> psutil.Process | None:
    """The process of a stage, once it has named itself (it does so before it loads weights)."""
    return _titled(leader, f"VLLM::Worker_PP{stage}")


def _titled(leader: int, name: str) -> psutil.Process | None:
    return next((process for process in of_session(leader) if title(process) == name), None)


def shared_memory(leader: int) -> set[str]:
    """Names in /dev/shm that the session's processes have mapped; other servers of the machine have names there too."""
    found = set()
    for process in of_session(leader):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {
                line.split("/dev/shm/", 1)[1] for line in lines if "/dev/shm/" in line and "(deleted)" not in line
            }
    return found


def still_there(names: set[str]) -> set[str]:
    return {name for name in names if (SHM / name).exists()}


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def after(leader: int, names: set[str], port: int, within: float = ENDED_WITHIN) -> dict[str, list[str] | bool]:
    """What is left of a server that ended, as soon as that is nothing, or else once `within` seconds have passed."""
    deadline = time.monotonic() + within
    while True:
        left = {
            "left_processes": sorted(title(process) for process in of_session(leader)),
            "left_shared_memory": sorted(still_there(names)),
            "left_port": listens(port),
        }
        if not any(left.values()) or time.monotonic() >= deadline:
            return left
        time.sleep(0.2)


def remove(leader: int, names: set[str]) -> None:
    """Clear what a case left, so that the next starts clean."""
    for process in of_session(leader):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    for name in names:
        with contextlib.suppress(OSError):
            (SHM / name).unlink()
