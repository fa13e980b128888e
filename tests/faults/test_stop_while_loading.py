"""What interrupts the wait for the engine is not taken for the engine's being ready."""

import pytest
import zmq

from vllm.utils.network_utils import get_open_zmq_ipc_path, zmq_socket_ctx


def test_an_interruption_passes_and_the_socket_is_closed():
    with pytest.raises(KeyboardInterrupt), zmq_socket_ctx(get_open_zmq_ipc_path(), zmq.ROUTER, bind=True) as socket:
        raise KeyboardInterrupt
    assert socket.closed
