"""A server that stopped by itself says so in its exit status."""

import asyncio

import pytest

from vllm.entrypoints.launchers.exit_status import end_of_server


def test_unasked():
    with pytest.raises(SystemExit) as end:
        asyncio.run(end_of_server(asked=False))
    assert end.value.code == 1


def test_asked():
    asyncio.run(end_of_server(asked=True))
