# SPDX-License-Identifier: Apache-2.0
"""Workers on other machines, in the place where those of this one answer about the n-gram table.

Ray's workers dial the engine core, which knows their machines and they its address. For each that came it opens a socket
such as `ngram_table` looks for, and passes the question on: whoever asks sees no difference. The engine core's own
loop and messages have no part in it.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics import ngram_table

logger = init_logger(__name__)

#: Less than whoever asks has: it must hear from the others, too.
_PATIENCE = 0.7
#: Between two attempts to reach an engine core; without one, the worker ends soon for other reasons.
_PAUSE = 5.0
_QUESTION = b"?"


class _Lost(OSError):
    """A worker no longer answers; it dials again if it lives."""


def listen(host: str) -> None:
    """In the engine core, before workers start: be there for them, at an address of this machine that they can reach.

    Where the address is not this machine's, as behind a translation of addresses, a server without these figures is
    better than none.
    """
    ngram_table.prepare()
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        logger.warning(
            "No vllm:ngram_table_* on /metrics from stages on other machines: cannot listen at %s, which Ray calls this "
            "machine (%s). Give `ray start` here a --node-ip-address that it has.",
            host,
            error,
        )
        return
    os.environ[ngram_table.RELAY] = f"{host} {listener.getsockname()[1]}"
    threading.Thread(target=_accept, args=(listener,), name="ngram-relay", daemon=True).start()


def dial(made: Callable[[], dict[str, Any]]) -> None:
    """In a worker: answer the engine core with `made()`, for as long as the process lives."""
    threading.Thread(target=_answer_for_ever, args=(made,), name="ngram-metrics", daemon=True).start()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_pass_on, args=(connection,), name="ngram-relay", daemon=True).start()


def _pass_on(worker: socket.socket) -> None:
    """Stand in for a worker until it is lost. Somebody without the engine's word is not listened to."""
    word = os.environ[ngram_table.WORD].encode()
    try:
        worker.settimeout(_PATIENCE)
        with worker, worker.makefile("rwb") as lines:
            if not hmac.compare_digest(lines.readline(len(word) + 1).rstrip(b"\n"), word):
                return

            def asked() -> bytes:
                lines.write(_QUESTION + b"\n")
                lines.flush()
                answer = lines.readline()
                if not answer.endswith(b"\n"):
                    raise _Lost
                return answer

            ngram_table.stand(ngram_table.findable(), asked)
    except OSError:
        return


def _answer_for_ever(made: Callable[[], dict[str, Any]]) -> None:
    host, port = os.environ[ngram_table.RELAY].split()
    while True:
        try:
            with socket.create_connection((host, int(port))) as core, core.makefile("rwb") as lines:
                lines.write(os.environ[ngram_table.WORD].encode() + b"\n")
                lines.flush()
                while lines.readline():
                    lines.write(json.dumps(made()).encode() + b"\n")
                    lines.flush()
        except OSError:
            pass
        time.sleep(_PAUSE)
