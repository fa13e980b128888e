# SPDX-License-Identifier: Apache-2.0
"""What reading rows of the n-gram table costs, from the worker that reads them to `/metrics`.

Only the last stage's answer to a step is read, and the table is rarely there; asking all workers by `collective_rpc`
would hold up the steps in flight.  So a worker with a table answers on a socket of its own, from a thread that sleeps
until somebody asks, and every API server of the machine asks when it is scraped.  The sockets are abstract ones, which
leave no file behind whatever a worker dies of.  Their names begin with a word that all processes of one engine inherit.
Ray's workers, which may be on another machine, answer through the engine core (`ngram_table_relay.py`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: The environment variable with the word; not a setting.
WORD = "NGRAM_TABLE_SOCKETS"
#: The same with host and port of an engine core that passes questions on; Ray hands both to every worker.
RELAY = "NGRAM_TABLE_RELAY"
#: A worker that is in the middle of something answers at the next scrape.
_PATIENCE = 1.0
_LABELS = ("model_name", "engine", "stage", "rank")

#: name of a counter in the worker -> what it is, for `/metrics`
NAMES = {
    "steps": "Steps whose rows were read.",
    "rows": "Rows that steps needed, repeats included.",
    "unique_rows": "Rows that steps needed, each once a step.",
    "requested_bytes": "Bytes of rows asked from the kernel, those read ahead included.",
    "cached_reads": "Reads that the page cache answered; stays 0 on file systems that do not tell.",
    "missed_reads": "Reads that had to wait for the disk; stays 0 on file systems that do not tell.",
    "disk_bytes": "Bytes of the 4 KiB pages that missed reads needed.",
    "ahead_rows": "Of the unique rows, those that had been read while an earlier step was computed.",
    "token_wait_seconds": "Time spent waiting for a step's tokens to reach the host.",
    "row_wait_seconds": "Time spent waiting for rows.",
    "failures": "Steps that were given up because rows could not be read.",
}


def prepare() -> None:
    """Choose the word, in the first process that makes an engine's configuration; later ones inherit it."""
    os.environ.setdefault(WORD, uuid.uuid4().hex[:16])


def answer(
    labels: dict[str, str],
    snapshot: Callable[[], dict[str, float]],
    reasons: Callable[[], dict[str, str]] = dict,
) -> None:
    """In a worker: answer whoever asks, for as long as the process lives.

    Args:
        labels: engine, stage and rank of this worker
        snapshot: gives the counters
        reasons: gives, by request, why rows of it could not be read
    """

    def made() -> dict[str, Any]:
        return {"labels": labels, "counters": snapshot(), "reasons": reasons()}

    prepare()
    if RELAY in os.environ:
        from vllm.v1.metrics import ngram_table_relay

        ngram_table_relay.dial(made)
        return
    arguments = (findable(), lambda: json.dumps(made()).encode())
    threading.Thread(target=stand, args=arguments, name="ngram-metrics", daemon=True).start()


def findable() -> socket.socket:
    """A socket where everybody who asks will look."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{_prefix()}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    listener.listen(8)
    return listener


def stand(listener: socket.socket, asked: Callable[[], bytes]) -> None:
    """Answer with `asked()` until that raises."""
    with listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                text = asked()
                with suppress(OSError):  # whoever asked has gone
                    connection.sendall(text)


def show(vllm_config: VllmConfig) -> None:
    """In an API server: add the counters to what is scraped, if rows are read from files."""
    engram = vllm_config.engram_config
    if engram is not None and engram.host_file_gather:
        _counters.model_name = vllm_config.model_config.served_model_name
        if vllm_config.parallel_config.nnodes > 1:
            # Imported here: workers' answers, and tests of them, need nothing of vLLM.
            from vllm.logger import init_logger

            init_logger(__name__).warning(
                "vllm:ngram_table_* on /metrics has the stages of this machine only; those of the other machines of "
                "--nnodes do not reach it. Stages under --distributed-executor-backend ray do."
            )
        if _counters not in REGISTRY._collector_to_names:
            REGISTRY.register(_counters)


def show_in(registry: CollectorRegistry) -> None:
    """The same for the registry of one of several API servers, which is not the global one."""
    registry.register(_counters)


def reason(request: str) -> str | None:
    """In the engine core: why rows of a request could not be read, if that is what happened to it."""
    answers = (_ask(name) for name in _sockets())
    return next((found for made in answers if made and (found := made["reasons"].get(request))), None)


class _Counters(Collector):
    """Asks the workers at every scrape.

    Attributes:
        model_name: None where no table is read from files
    """

    model_name: str | None = None

    def describe(self) -> list:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        if self.model_name is None:
            return
        answers = [made for name in _sockets() if (made := _ask(name)) is not None]
        for name, what in NAMES.items():
            family = CounterMetricFamily(f"vllm:ngram_table_{name}", what, labels=_LABELS)
            for made in answers:
                labels = made["labels"] | {"model_name": self.model_name}
                family.add_metric([labels[label] for label in _LABELS], made["counters"][name])
            yield family


_counters = _Counters()


def _prefix() -> str:
    return f"vllm-ngram-table-{os.environ[WORD]}-"


def _sockets() -> list[str]:
    """Names of the sockets of this engine's workers, by the kernel's table of this network namespace."""
    if WORD not in os.environ:
        return []
    try:
        with open("/proc/net/unix") as table:
            names = {line.split()[-1] for line in table if f"@{_prefix()}" in line}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith("@"))


def _ask(name: str) -> dict[str, Any] | None:
    """A worker's counters; None where it does not answer, or has ended meanwhile."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect("\0" + name[1:])
            text = b""
            while part := connection.recv(4096):
                text += part
        return json.loads(text)
    except (OSError, ValueError):
        return None
