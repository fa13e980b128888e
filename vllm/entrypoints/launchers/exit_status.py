# SPDX-License-Identifier: Apache-2.0
"""The exit status of a server that stopped by itself."""

from vllm.logger import init_logger

logger = init_logger(__name__)


async def end_of_server(asked: bool) -> None:
    """Awaited last, once the server has stopped listening and its engine is cleared away.

    Upstream returns here as after a request to stop, so that `vllm serve` ends with status 0 when a worker died, and
    neither systemd (Restart=on-failure) nor Docker (restart: on-failure) starts it again.

    Args:
        asked: whether a signal asked the server to stop

    Raises:
        SystemExit: with status 1, if not.
    """
    if not asked:
        logger.error("The server stopped unasked: its engine died or it could not listen. Exit status 1.")
        raise SystemExit(1)
