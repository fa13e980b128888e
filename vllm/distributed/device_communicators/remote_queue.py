# SPDX-License-Identifier: Apache-2.0
"""Reading a message queue whose writer is on another machine."""

import time
from typing import Any

#: Milliseconds between two looks at whether the queue was shut down.  A message is not delayed by it.
TURN = 200


def receive(queue: Any, timeout: float | None) -> Any:
    """The next message of a remote reader's queue, unless the queue is shut down while waiting.

    A queue in shared memory wakes its reader when it is shut down; one that comes over a socket only notes it, and its
    reader waits on for a worker that is known to be dead: five minutes for a step, for ever while the model loads.

    Args:
        queue: a MessageQueue with a `remote_socket`
        timeout: seconds; None waits for ever

    Raises:
        TimeoutError: nothing came in time.
        RuntimeError: the queue was shut down, in the words that the readers of shared memory raise.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if queue.shutting_down:
            raise RuntimeError("cancelled")
        left = TURN if deadline is None else min(TURN, max(0, int((deadline - time.monotonic()) * 1000)))
        if queue.remote_socket.poll(timeout=left):
            return queue.recv(queue.remote_socket, 0)
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
