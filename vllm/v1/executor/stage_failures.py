# SPDX-License-Identifier: Apache-2.0
"""Failures of one stage that the engine would otherwise not hear of, or hear of late.

Upstream reads the answers of a call in the order of the stages, and for a step of the model only that of the last.
A stage that raises leaves the others waiting for what it would have sent them, so whoever the engine waits for may
never answer: a step hangs for five minutes, and a warm-up for ever.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.executor.stage_pulse import end_within

logger = init_logger(__name__)

#: Seconds to wait for one stage before looking at the next.  Answers that are there are read at once.
TURN = 0.05
#: Seconds that the other stages get to answer once one has failed, so that no answer stays behind in a queue and is
#: taken for that of the next call.
SETTLE = 2.0
#: Seconds until a failed worker, or one that lost its neighbour, is killed.  Nothing of it is worth saving; without the
#: neighbour it mostly waits in a collective, which only SIGKILL ends.
END = 1.0


class UnheardFailure(RuntimeError):
    """A stage failed in a call whose answer is read from another stage; ends the worker."""


def end_unheard(method: Any, error: Exception, fault_tolerance: bool) -> None:
    """End this worker after a failure that nobody would read, and with it the server.

    Args:
        method: name of the call, or the pickled call
        error: what it raised
        fault_tolerance: ParallelConfig.enable_fault_tolerance, which lets an engine live on after a failed step

    Raises:
        UnheardFailure: unless fault tolerance is on.
    """
    if fault_tolerance:
        return
    end_within(END)
    name = method if isinstance(method, str) else "a pickled call"
    raise UnheardFailure(f"{name} failed with {type(error).__name__}: {error}") from error


def end_after_death(executor: Any) -> None:
    """Shut down an executor that lost a worker: those who wait for an answer hear of it first.

    Upstream's `shutdown` wakes the engine last, after up to nine seconds of asking the other workers to end.

    Args:
        executor: a MultiprocExecutor, in the thread that noticed the death
    """
    for queue in getattr(executor, "response_mqs", []):
        queue.shutdown()
    # Waking a queue is not safe from two threads, and the engine's shuts down what it finds here.
    executor.response_mqs = []
    # Not a daemon: the process stays until the others are gone.
    killing = threading.Timer(END, lambda: [worker.proc.kill() for worker in executor.workers])
    killing.start()
    executor.shutdown()
    killing.cancel()


class Answer:
    """An answer that was read already, in the place of the queue that it came from."""

    def __init__(self, status: Any, result: Any):
        self.status = status
        self.result = result

    def dequeue(self, timeout: float | None = None) -> tuple[Any, Any]:
        return self.status, self.result


def failures_first(queues: Sequence[Any], deadline: float | None, success: Any) -> Iterator[Any]:
    """What to read a call's answers from: the failed ones as soon as there are any, else all in the stages' order.

    Args:
        queues: of the stages that answer, in their order; `dequeue(timeout=)` gives (status, result) or raises TimeoutError
        deadline: on time.monotonic(); None waits for ever
        success: the status of a call that did not fail

    Yields:
        Something with a `dequeue(timeout=)` like that of the queues.  After the deadline the queues of stages that have
        not answered, whose own TimeoutError the caller expects.
    """
    if len(queues) == 1:
        yield queues[0]
        return
    answers: dict[int, Answer] = {}
    failed: list[int] = []
    while len(answers) < len(queues) and (deadline is None or time.monotonic() < deadline):
        for stage, queue in enumerate(queues):
            if stage in answers:
                continue
            try:
                answers[stage] = Answer(*queue.dequeue(timeout=TURN))
            except TimeoutError:
                continue
            if answers[stage].status != success:
                failed.append(stage)
                deadline = min(deadline or float("inf"), time.monotonic() + SETTLE)
    for stage in failed:
        yield answers[stage]
    for stage, queue in enumerate(queues):
        if stage not in failed:
            yield answers.get(stage, queue)
